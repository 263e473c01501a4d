"""A translation set laid out as the hub has them (a folder of parquet files for each language pair), read whole."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from suite.data.text import hub
from suite.data.text.prepare import folder_of, prepare
from suite.data.text.text import TextData
from suite.errors import DataError
from suite.settings import TextSettings

WORDS = ("sea", "hill", "rain", "house", "road", "tree", "stone", "bird", "ships")


def sentence(number: int, letters: str) -> str:
    """Returns a sentence of its own for each number."""
    return " ".join(letters[(number // 20**at) % 20] * (at + 2) for at in range(5)) + " " + WORDS[number % len(WORDS)]


ENGLISH, GERMAN, GREEK = "abcdefghijklmnopqrst", "zyxwvutsrqponmlkjihg", "αβγδεζηθικλμνξοπρστυ"


def rows(first: int, count: int, letters: str) -> list[tuple[str, str]]:
    return [(sentence(n, ENGLISH), sentence(n, letters)) for n in range(first, first + count)]


def lay_out(folder: Path, splits: dict[str, dict[str, list[tuple[str, str]]]]) -> None:
    """Writes parquet files and the page whose head names them, as Helsinki-NLP/opus-100 has them."""
    head = ["---", "configs:"]
    for config, parts in splits.items():
        head += [f"- config_name: {config}", "  data_files:"]
        other = next(code for code in config.split("-") if code != "en")
        for split, pairs in parts.items():
            head += [f"  - split: {split}", f"    path: {config}/{split}-*"]
            (folder / config).mkdir(parents=True, exist_ok=True)
            column = pa.array([{other: translation, "en": english} for english, translation in pairs])
            path = folder / config / f"{split}-00000-of-00001.parquet"
            pq.write_table(pa.table({"translation": column}), path, row_group_size=1000)
    (folder / "README.md").write_text("\n".join([*head, "---", ""]))


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "set"
    german = {
        "train": [*rows(0, 1500, GERMAN), *rows(0, 10, GERMAN), *rows(100_000, 100, GERMAN)],  # of its own test split
        "validation": rows(200_000, 50, GERMAN),
        "test": [*rows(100_000, 50, GERMAN), ("<b>The _File</b>", "Die _Datei %s")],
    }
    greek = {
        "train": [*rows(200_000, 40, GREEK), *rows(0, 600, GREEK), ("in Latin letters", "nicht griechisch")],
        "validation": rows(300_000, 30, GREEK),
        "test": rows(310_000, 20, GREEK),
    }
    only_train = {"train": rows(0, 150, "éèêabcdefghijklmnopq")}
    lay_out(
        folder,
        {"de-en": german, "el-en": greek, "en-yo": only_train, "de-fr": {"train": rows(0, 9, GERMAN)},
         "en-fy": {"train": rows(0, 20, "çdefghijklmnopqrstuv")}},
    )  # fmt: skip
    return folder


SETTINGS = TextSettings(vocabulary=500, max_length=64)


def prepared(corpus: Path, cache: Path, said: list[str]):
    settings = SETTINGS.model_copy(update={"corpus": str(corpus)})
    prepare(settings, cache, said.append)
    return TextData(folder_of(settings, cache), with_test=True)


def test_all_training_pairs_are_read_and_the_sets_own_splits_are_used(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "CHUNK", 600)
    monkeypatch.setattr(hub, "SCRIPT_PAIRS", 500)
    said: list[str] = []
    text = prepared(corpus, tmp_path / "cache", said)
    assert said[0] == f"reading all pairs of 4 languages of {corpus}, 600 at a time"
    assert not [line for line in said if "left out" in line]
    assert text.languages == ("de", "el", "yo")  # fy has fewer than 100 pairs; de-fr has no English
    # of German 50 are in its test split; of Greek 40 are in the German validation split, one is in Latin letters
    assert text.pairs == {"de": 1550, "el": 600, "yo": 150}
    assert text.sizes["valid"] == (50, 30, 0)
    assert text.sizes["test"] == (51, 20, 0)
    assert len(text.splits["train"]) == 2300
    assert text.texts("test", [0, 50]) == [rows(100_000, 1, GERMAN)[0], ("<b>The _File</b>", "Die _Datei %s")]
    translations = [text.tokenizer.decode(ids) for _, ids in text.token_ids("train", range(2300))]
    assert [at for at, each in enumerate(translations) if re.search("[\u03b1-\u03c9]", each)] == [*range(1550, 2150)]
    ((english, german),) = text.token_ids("train", [0])
    assert text.tokenizer.decode(english).startswith("aa aaa aaaa")
    assert text.tokenizer.decode(german).startswith("zz zzz zzzz")
    assert not list((folder_of(SETTINGS.model_copy(update={"corpus": str(corpus)}), tmp_path / "cache")).glob("draft"))


def test_a_set_without_a_split_or_without_english_is_refused(tmp_path):
    lay_out(tmp_path / "a", {"de-en": {"train": rows(0, 200, GERMAN), "validation": rows(900, 5, GERMAN)}})
    with pytest.raises(DataError, match=r"/a has no test split"):
        prepared(tmp_path / "a", tmp_path / "cache", [])
    lay_out(tmp_path / "b", {"de-fr": {"train": rows(0, 200, GERMAN)}})
    with pytest.raises(DataError, match=r"/b has no language pair with English"):
        prepared(tmp_path / "b", tmp_path / "cache", [])
    assert not list((tmp_path / "cache").glob("text-*/"))


SAME = [(sentence(n, ENGLISH), sentence(n, ENGLISH)) for n in range(500, 600)]
"""Pairs that are not usable: the English is not translated."""


def test_a_first_chunk_without_usable_pairs_does_not_decide_the_script(tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "CHUNK", 100)
    monkeypatch.setattr(hub, "SCRIPT_PAIRS", 100)
    train = [*SAME[10:], *rows(600, 10, GERMAN), *rows(0, 400, GREEK)]
    parts = {"train": train, "validation": rows(900, 20, GREEK), "test": rows(950, 20, GREEK)}
    lay_out(tmp_path / "set", {"el-en": parts})
    said: list[str] = []
    text = hub.read_hub(str(tmp_path / "set"), tmp_path / "draft", said.append)
    assert text.sizes["train"] == {"el": 400}
    assert said == [
        f"reading all pairs of 1 language of {tmp_path / 'set'}, 100 at a time",
        "el: 400 training pairs after cleaning",
    ]


def test_many_pairs_in_another_script_are_not_left_out_in_silence(tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "CHUNK", 100)
    monkeypatch.setattr(hub, "SCRIPT_PAIRS", 100)
    train = [*rows(0, 150, GREEK), *rows(200, 300, GERMAN)]
    lay_out(tmp_path / "set", {"el-en": {"train": train, "validation": SAME[:9], "test": SAME[9:20]}})
    said: list[str] = []
    hub.read_hub(str(tmp_path / "set"), tmp_path / "draft", said.append)
    assert said[1] == "el: dropped 300 training pairs that are not in the script of the first ones"


def test_a_damaged_file_of_a_folder_is_not_blamed_on_the_hub(corpus, tmp_path):
    (corpus / "de-en" / "train-00000-of-00001.parquet").write_bytes(b"PAR1 no parquet")
    with pytest.raises(
        DataError, match=rf"^the folder {corpus} could not be read \(.*\); check its files and their names"
    ):
        prepared(corpus, tmp_path / "cache", [])


def test_a_changed_file_of_a_folder_is_prepared_anew(corpus, tmp_path):
    settings = TextSettings(corpus=str(corpus), vocabulary=300, languages=("de", "el"))
    before = folder_of(settings, tmp_path)
    assert folder_of(settings, tmp_path) == before
    path = next(corpus.glob("de-en/train-*"))
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))
    assert folder_of(settings, tmp_path) != before


def test_a_full_disk_is_not_blamed_on_the_set(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "_file", lambda *_: Path("/dev/full"))
    with pytest.raises(OSError, match="No space left") as caught:
        prepared(corpus, tmp_path / "cache", [])
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, "/dev/full")
