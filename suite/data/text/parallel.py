"""A folder of your own parallel text: one or more files a language pair and split.

    train.de-en.de + train.de-en.en      one sentence a line (WMT, Moses)
    train.de-en.tsv                      two columns, in the order of the name
    train.de-en.jsonl                    {"de": "...", "en": "..."}, or these under "translation"
    train.de-en.parquet                  columns de and en, or a column translation with both

Each pair has English on one side. ``valid`` (or dev, validation) and ``test`` are used as they are, and training pairs
whose English side is in them are dropped; without such files ``splitting`` holds pairs out.
"""

from __future__ import annotations

import csv
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from suite.data.text.cleaning import Sentences, clean
from suite.data.text.languages import canonical
from suite.data.text.splitting import TEST, TRAIN, VALID, group_key, split
from suite.errors import DataError, first_line
from suite.log import Log

_SPLIT_NAMES = {"train": TRAIN, "valid": VALID, "dev": VALID, "validation": VALID, "test": TEST}
_FILE = re.compile(r"(train|valid|dev|validation|test)\.([A-Za-z_@]+)-([A-Za-z_@]+)\.(\w+)")

Texts = Iterator[tuple[str, str]]
"""(English, translation)."""


@dataclass(frozen=True)
class _Part:
    """The text of a language in one split, in one file or two."""

    path: Path
    sides: tuple[str, str]
    """Codes, in the order of the name."""

    @property
    def other(self) -> str:
        return next(side for side in self.sides if side != "en")


def is_parallel_folder(name: str) -> bool:
    """Whether ``name`` is a folder with files of this layout."""
    folder = Path(name)
    return folder.is_dir() and any(_FILE.fullmatch(path.name) for path in folder.iterdir())


def read_parallel_folder(name: str, is_cleaned: bool, log: Log) -> dict[str, Sentences]:
    """Returns {split: sentences} of a folder. Cleaning is that of the catalogues (``cleaning``); without it only empty
    sides and repeated pairs are dropped.

    Raises DataError for files that cannot be read, sides of unequal length, a pair without English, and a folder
    without training pairs or with only one of valid and test.
    """
    parts = _parts(Path(name))
    if (VALID in parts) != (TEST in parts):
        present, missing = (VALID, TEST) if VALID in parts else (TEST, VALID)
        raise DataError(
            f"{name} has {present} files but no {missing} files; add them, or remove the {present} files, and both are "
            "held out from the training text"
        )
    if TRAIN not in parts:
        raise DataError(f"{name} has no training text, such as train.de-en.de and train.de-en.en")
    own = {
        held: {language: list(_texts(of)) for language, of in parts[held].items()} for held in parts if held != TRAIN
    }
    held_out = {
        group_key(english) for sentences in own.values() for texts in sentences.values() for english, _ in texts
    }
    train: Sentences = {}
    for language, files in parts[TRAIN].items():
        raw = list(_texts(files))
        kept = _cleaned(language, raw) if is_cleaned else list(dict.fromkeys(raw))
        new = [pair for pair in kept if group_key(pair[0]) not in held_out]
        log(
            f"{language}: {len(raw)} training pairs, {len(raw) - len(kept)} dropped"
            f"{' by cleaning' if is_cleaned else ' as repeated'}, {len(kept) - len(new)} because their English side is "
            f"held out: {len(new)} left"
        )
        if new:
            train[language] = new
    if not train:
        raise DataError(f"no training pair of {name} is left; text.clean=false keeps all but empty and held-out ones")
    if not own:
        return split(train)
    known = {held: {language: texts for language, texts in of.items() if language in train} for held, of in own.items()}
    return {TRAIN: train} | {held: {language: of.get(language, []) for language in train} for held, of in known.items()}


def _parts(folder: Path) -> dict[str, dict[str, list[_Part]]]:
    """Returns {split: {language: files}}, languages in sorted order; of two files of a pair the first side's."""
    parts: defaultdict[str, defaultdict[str, list[_Part]]] = defaultdict(lambda: defaultdict(list))
    for path in sorted(folder.iterdir()):
        match = _FILE.fullmatch(path.name)
        if match is None:
            continue
        split_name, first, second, kind = match.groups()
        if kind not in (*_READERS, first, second):
            raise DataError(f"{path} has an unknown format; use one file a side, .tsv, .jsonl or .parquet")
        if "en" not in (first, second):
            raise DataError(f"{path} has no English side; each pair needs one, such as de-en")
        part = _Part(path, (first, second))
        language = canonical(part.other)
        if language is None:
            raise DataError(f"{path}: {part.other} is not a language code such as de or pt_BR")
        if kind != second:  # the other half of a pair of files
            parts[_SPLIT_NAMES[split_name]][language].append(part)
    return {name: dict(sorted(languages.items())) for name, languages in parts.items()}


def _cleaned(language: str, raw: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    return clean(((language, english, text) for english, text in raw), fewest=1).get(language, [])


def _texts(parts: Sequence[_Part]) -> Texts:
    """Yields the pairs that have text on both sides. Raises DataError for a file that cannot be read."""
    for part in parts:
        read = _READERS.get(part.path.suffix.removeprefix("."), _read_lines)
        at_english = part.sides.index("en")
        try:
            for sides in read(part):
                texts = tuple(str(side).strip() for side in sides)
                if all(texts):
                    yield texts[at_english], texts[1 - at_english]
        except UnicodeDecodeError as error:
            raise DataError(f"{part.path} is not UTF-8 (byte {error.start}: {error.reason}); convert it") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{part.path} cannot be read: {type(error).__name__}: {first_line(error)}") from error


def _read_lines(part: _Part) -> Iterator[Sequence[str]]:
    first = part.path
    second = first.with_suffix(f".{part.sides[1]}")
    if not second.exists():
        raise DataError(f"{first} has no other side {second.name}")
    sides = [path.read_bytes().decode().removesuffix("\n").split("\n") for path in (first, second)]
    if len(sides[0]) != len(sides[1]):
        raise DataError(
            f"{first} has {len(sides[0])} lines and {second.name} {len(sides[1])}; line n of one translates line n of "
            "the other"
        )
    return zip(*sides, strict=True)


def _read_tsv(part: _Part) -> Iterator[Sequence[str]]:
    with part.path.open(newline="", encoding="utf-8") as file:
        for number, row in enumerate(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE), 1):
            if len(row) != 2:
                raise ValueError(f"line {number} has {len(row)} columns, not 2")
            yield row


def _read_jsonl(part: _Part) -> Iterator[Sequence[str]]:
    with part.path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                yield _sides(json.loads(line), part)
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"line {number}: {type(error).__name__}: {first_line(error)}") from error


def _read_parquet(part: _Part) -> Iterator[Sequence[str]]:
    for batch in pq.ParquetFile(part.path).iter_batches():
        for row in batch.to_pylist():
            yield _sides(row, part)


def _sides(row: Mapping[str, Any], part: _Part) -> Sequence[str]:
    texts = row.get("translation", row)
    return [texts[side] or "" for side in part.sides]


_READERS: dict[str, Callable[[_Part], Iterator[Sequence[str]]]] = {
    "tsv": _read_tsv,
    "jsonl": _read_jsonl,
    "parquet": _read_parquet,
}
