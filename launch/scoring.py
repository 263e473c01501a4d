"""``make score RUN=...``: BLEU and chrF of a trained run's model on the held-out test pairs, language by language.

    scores.json                     the scores, their signatures, the speed
    scores/en-de.src, .hyp, .ref    what was translated, a line a sentence

sacreBLEU's command line gives these files the same scores.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments.score_settings import read
from experiments.table import Table, Value
from launch.decoding import decode, stages_of, text_run
from launch.model_text import language_of, text_of, trained_languages
from launch.publishing import publish
from launch.runs import RunFolder, find_run, held
from suite.data.splitting import TEST
from suite.data.text import TextData
from suite.data.tokenizer import END_ID, ENGLISH
from suite.errors import DataError
from suite.evaluation.beam import LENGTH_PENALTY, SIZE
from suite.evaluation.scores import FEWEST_PAIRS, Scores, macro, one_line, score
from suite.evaluation.thirds import THIRDS, thirds


@dataclass(frozen=True)
class Direction:
    """The test pairs of a language one way."""

    language: str
    source: str
    target: str
    sources: list[list[int]]
    """As the model reads them."""
    lines: list[str]
    references: list[str]

    @property
    def name(self) -> str:
        """As in the files' names."""
        return f"{self.source}-{self.target}"


def score_typed(asked: str, settings: str, console: Console) -> None:
    """Scores a run as a person asks for it. Raises SettingError for an unknown run or setting, and as ``score_run``."""
    chosen = read(settings)
    score_run(
        find_run(asked), console, beam=chosen.beam, languages=chosen.languages, max_pairs=chosen.max_pairs,
        stages=chosen.stages,
    )  # fmt: skip


def score_run(
    run: RunFolder, console: Console, *, beam: int = SIZE, languages: Sequence[str] | None = None,
    max_pairs: int | None = None, stages: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Translates a run's test pairs in both directions, writes ``scores.json`` and the texts, and returns the former.

    Without ``languages`` all are scored that the run was trained on and that have ``FEWEST_PAIRS`` test pairs. Thirds
    are of all languages of the text with so many, by training pairs, whichever are asked for. Raises SettingError for
    an unknown language or where another process trains or scores the run, DataError for a language with fewer pairs,
    CheckpointError when the run has no finished checkpoint.
    """
    with held(run.path):
        return _score(run, console, beam, languages, max_pairs, stages)


def _score(
    run: RunFolder, console: Console, beam: int, languages: Sequence[str] | None, max_pairs: int | None,
    stages: int | None,
) -> dict[str, Any]:  # fmt: skip
    experiment = text_run(run)
    data = text_of(run, experiment, console)
    sizes = dict(zip(data.languages, data.sizes[TEST], strict=True))
    chosen = _chosen({code: sizes[code] for code in trained_languages(experiment, data)}, languages, data)
    ways = [one for language in chosen for one in directions(language, data, max_pairs)]
    sources = [source for one in ways for source in one.sources]
    k = stages_of(experiment, stages)
    console.print(f"translating {len(sources):,} sentences in {len(ways)} directions, beam {beam}, K = {k}")
    written = decode(run, sources, k, console, beam)
    texts = iter([one_line(text) for text in data.tokenizer.batch_decode(written.tokens, skip_special_tokens=True)])
    shutil.rmtree(run.path / "scores", ignore_errors=True)
    (run.path / "scores").mkdir()
    found: dict[str, Scores] = {}
    for one in ways:
        hypotheses = [next(texts) for _ in one.sources]
        _write(run.path / "scores", one, hypotheses)
        found[one.name], signatures = score(hypotheses, one.references)
    third_of = thirds({language: data.pairs[language] for language, pairs in sizes.items() if pairs >= FEWEST_PAIRS})
    record = {
        "step": written.step,
        "split": TEST,
        "beam": beam,
        "length_penalty": LENGTH_PENALTY,
        "max_pairs": max_pairs,
        "max_tokens": experiment.text.max_tokens,
        "seconds": written.seconds,
        "sentences_per_second": len(sources) / written.seconds,
        "signatures": signatures,
        "directions": {
            one.name: {
                "pairs": len(one.sources),
                "train_pairs": data.pairs[one.language],
                "bleu": found[one.name].bleu,
                "chrf": found[one.name].chrf,
            }
            for one in ways
        },
        "thirds": {language: third_of[language] for language in chosen},
        "macro": macro(found, {one.name: third_of[one.language] for one in ways}),
    }
    draft = run.path / "scores.json.draft"
    draft.write_text(json.dumps(record, indent=1) + "\n")
    draft.rename(run.path / "scores.json")
    _tell(run, record, console)
    publish(run, "scores", console.print)
    return record


def _chosen(sizes: dict[str, int], asked: Sequence[str] | None, data: TextData) -> list[str]:
    """Returns the languages that are scored; ``sizes`` are the test pairs of those that the run was trained on."""
    enough = [language for language, pairs in sizes.items() if pairs >= FEWEST_PAIRS]
    if asked is None:
        if not enough:
            raise DataError(
                f"no language that the run was trained on has {FEWEST_PAIRS} test pairs; take a larger corpus"
            )
        return enough
    codes = list(dict.fromkeys(language_of(code, list(sizes)) for code in asked))
    few = [f"{code} has {sizes[code]}" for code in codes if code not in enough]
    if few:
        raise DataError(
            f"a language is scored on {FEWEST_PAIRS} test pairs or more, and of {data.corpus} {', '.join(few)}; "
            f"these have enough: {', '.join(enough) or 'none'}"
        )
    return codes


def directions(language: str, data: TextData, most: int | None) -> Iterator[Direction]:
    """Yields both directions of a language's test pairs, ``most`` of them at even distances."""
    at = data.languages.index(language)
    start, count = sum(data.sizes[TEST][:at]), data.sizes[TEST][at]
    taken = count if most is None else min(most, count)
    rows = [start + place * count // taken for place in range(taken)]
    ids, texts = data.token_ids(TEST, rows), data.texts(TEST, rows)
    english, other = [one_line(pair[0]) for pair in texts], [one_line(pair[1]) for pair in texts]
    there, back = data.language_id(language), data.english_id
    yield Direction(language, ENGLISH, language, [[there, *pair[0], END_ID] for pair in ids], english, other)
    yield Direction(language, language, ENGLISH, [[back, *pair[1], END_ID] for pair in ids], other, english)


def _write(folder: Path, one: Direction, hypotheses: Sequence[str]) -> None:
    for kind, lines in (("src", one.lines), ("hyp", hypotheses), ("ref", one.references)):
        (folder / f"{one.name}.{kind}").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _tell(run: RunFolder, record: dict[str, Any], console: Console) -> None:
    columns = ("all", *THIRDS)
    third_of = record["thirds"]
    counts = {"all": len(third_of)} | {third: list(third_of.values()).count(third) for third in THIRDS}
    rows: list[list[Value]] = [["languages", *(counts[column] for column in columns)]]
    for measure, shown in (("bleu", "BLEU"), ("chrf", "chrF")):
        rows.append([shown, *(record["macro"][measure][column] for column in columns)])
    notes = [record["signatures"]["bleu"], record["signatures"]["chrf"]]
    title = f"means over languages and both directions, checkpoint of step {record['step']}"
    table = Table("scores", title, ("", *columns), rows, notes)
    console.print(table.shown() if console.is_terminal else table.markdown())
    console.print(f"{record['sentences_per_second']:,.0f} sentences a second; scores: {run.path / 'scores.json'}")
