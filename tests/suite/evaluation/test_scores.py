"""Scores are sacreBLEU's own, to the last digit it prints; thirds and means by hand."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from suite.evaluation.scores import TranslatedPair, macro_average, one_line, score, score_pairs, signatures, thirds


def test_scores_are_those_of_the_command_line(tmp_path):
    chance = random.Random(0)
    words = ["the", "a", "file", "save", "open,", "close.", "über", "Datei", "%", "löschen", "(s)", "'x'", "你好", "12"]
    references = [" ".join(chance.choices(words, k=chance.randint(1, 9))) for _ in range(60)]
    written = [" ".join(word for word in line.split() if chance.random() < 0.8) for line in references]
    assert "" in written  # an empty translation is a line too
    for name, lines in (("hyp", written), ("ref", references)):
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    command = [str(Path(sys.executable).with_name("sacrebleu")), "ref", "-i", "hyp", "-m", "bleu", "chrf", "-w", "10"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    theirs = {line["name"].lower().removesuffix("2"): line for line in json.loads(done.stdout)}
    ours = score(written, references)
    assert 20 < ours["bleu"] < 90
    assert (ours["bleu"], ours["chrf"]) == pytest.approx((theirs["bleu"]["score"], theirs["chrf"]["score"]), abs=1e-9)
    assert signatures() == {name: theirs[name]["signature"] for name in ("bleu", "chrf")}


@given(st.text())
def test_a_sentence_is_one_line_of_a_file(text):
    assert len(f"{one_line(text)}\n".splitlines()) == 1
    assert one_line(text).split() == text.split()


@given(st.dictionaries(st.text("abc", min_size=1, max_size=3), st.integers(0, 5)))
def test_thirds_are_even_and_in_order(sizes):
    found = thirds(sizes)
    assert found.keys() == sizes.keys()
    counts = [list(found.values()).count(third) for third in ("high", "middle", "low")]
    assert counts == sorted(counts, reverse=True)
    assert max(counts) - min(counts) <= 1
    for one in sizes:
        for other in sizes:
            if sizes[one] > sizes[other]:
                assert ("high", "middle", "low").index(found[one]) <= ("high", "middle", "low").index(found[other])


def test_means_count_each_direction_alike():
    found = {
        "en-de": {"nll": 2.0, "bleu": 40, "chrf": 60},
        "de-en": {"nll": 3.0, "bleu": 20, "chrf": 50},
        "en-ga": {"nll": 5.5, "bleu": 3, "chrf": 10},
    }
    third_of = {"en-de": "high", "de-en": "high", "en-ga": "low"}
    assert macro_average(found, third_of) == {
        "nll": {"all": 3.5, "high": 2.5, "middle": None, "low": 5.5},
        "bleu": {"all": 21, "high": 30, "middle": None, "low": 3},
        "chrf": {"all": 40, "high": 55, "middle": None, "low": 10},
    }
    assert set(macro_average({"en-de": {"bleu": 1, "chrf": 2}}, third_of)) == {"bleu", "chrf"}


def test_pairs_are_scored_beside_their_copied_sources():
    sources = ["Ficheiro novo", "%(count)s ficheiros", "Aire", "Gardar"]
    written = ["New file", "%(count)s files", "Wind", "Save"]
    references = ["New file", "%(count)s files", "Air", "Save as"]
    nll, tokens = [2.0, 9.0, 4.0, 3.0], [3, 3, 2, 3]
    pairs = [TranslatedPair(*each) for each in zip(sources, written, references, nll, tokens, strict=True)]
    record = score_pairs(pairs)
    assert record["pairs"] == 4
    assert record["nll"] == 18 / 11
    assert (record["bleu"], record["chrf"]) == tuple(score(written, references).values())
    assert record["copy"]["chrf"] == score(sources, references)["chrf"] < record["chrf"]
    assert score_pairs([]) == {
        "pairs": 0, "nll": None, "bleu": None, "chrf": None, "copy": {"bleu": None, "chrf": None}
    }  # fmt: skip
