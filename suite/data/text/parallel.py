"""A folder of your own parallel text: one or more files a language pair and split.

    train.de-en.de + train.de-en.en      one sentence a line (WMT, Moses)
    train.de-en.tsv                      two columns, in the order of the name
    train.de-en.jsonl                    {"de": "...", "en": "..."}, or these under "translation"
    train.de-en.parquet                  columns de and en, or a column translation with both

Files of text may be compressed: train.de-en.tsv.gz. Each pair has English on one side. ``valid`` (or dev, validation)
and ``test`` are used as they are, and training pairs whose English side is in them are dropped; without such files
``splitting`` holds pairs out.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from suite.data.text.cleaning import Sentences, clean
from suite.data.text.languages import canonical
from suite.data.text.splitting import TEST, TRAIN, VALID, group_key, split
from suite.data.user_files import log_ignored, naming, read_json_lines, read_lines, text_of, visible_files
from suite.errors import DataError
from suite.log import Log

_SPLIT_NAMES = {"train": TRAIN, "valid": VALID, "dev": VALID, "validation": VALID, "test": TEST}
_FILE = re.compile(rf"({'|'.join(_SPLIT_NAMES)})\.([\w@]+-[\w@-]+)\.([\w@-]+?)(\.gz)?")


@dataclass(frozen=True)
class _Part:
    """The text of a language in one split, in one file or two."""

    path: Path
    sides: tuple[str, str]
    """Codes, in the order of the name."""
    kind: str
    """Format, or the code of the side that the file has."""


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
    parts = _parts(Path(name), log)
    if (VALID in parts) != (TEST in parts):
        present, missing = (VALID, TEST) if VALID in parts else (TEST, VALID)
        raise DataError(
            f"{name} has {present} files but no {missing} files; add them, or remove the {present} files, and both are "
            "held out from the training text"
        )
    if TRAIN not in parts:
        raise DataError(f"{name} has no training text, such as train.de-en.de and train.de-en.en")
    training = parts.pop(TRAIN)
    own = {
        held: {language: list(filter(all, _texts(of))) for language, of in of_split.items()}
        for held, of_split in parts.items()
    }
    held_out = {
        group_key(english) for sentences in own.values() for texts in sentences.values() for english, _ in texts
    }
    train: Sentences = {}
    for language, files in training.items():
        raw = list(_texts(files))
        kept = _cleaned(language, raw) if is_cleaned else list(dict.fromkeys(filter(all, raw)))
        new = [pair for pair in kept if group_key(pair[0]) not in held_out]
        why = "by cleaning" if is_cleaned else "as repeated or empty"
        log(
            f"{language}: {len(raw)} training pairs, {len(raw) - len(kept)} dropped {why}, "
            f"{len(kept) - len(new)} because their English side is held out: {len(new)} left"
        )
        if new:
            train[language] = new
    if not train:
        raise DataError(f"no training pair of {name} is left; text.clean=false keeps all but empty and held-out ones")
    if not own:
        drawn = split(train)
        counts = {name: sum(map(len, sentences.values())) for name, sentences in drawn.items()}
        log(
            f"no valid and test files: of all {sum(counts.values())} pairs {counts[VALID]} are held out for validation "
            f"and {counts[TEST]} for the test, by their English side"
        )
        return drawn
    for held, sentences in own.items():
        if untrained := sorted({*sentences} - {*train}):
            log(f"{held} pairs of languages without training pairs are not used: {', '.join(untrained)}")
    return {TRAIN: train} | {held: {language: of.get(language, []) for language in train} for held, of in own.items()}


def _parts(folder: Path, log: Log) -> dict[str, dict[str, list[_Part]]]:
    """Returns {split: {language: files}}, languages in sorted order; of two files of a pair the first side's."""
    parts: defaultdict[str, defaultdict[str, list[_Part]]] = defaultdict(lambda: defaultdict(list))
    unused: list[Path] = []
    files = visible_files(folder, log)
    plain = set(files)
    for path in files:
        if path.suffix == ".gz" and path.with_suffix("") in plain:
            raise DataError(f"{path.with_suffix('')} is there compressed, too; remove one of them")
        match = _FILE.fullmatch(str(path.relative_to(folder)))
        if match is None:
            unused.append(path)
            continue
        sides, kind = _codes(match[2], path), match[3]
        if kind not in (*_READERS, *sides):
            raise DataError(f"{path} has an unknown format; use one file a side, .tsv, .jsonl or .parquet")
        other = sides[1 - sides.index("en")]
        language = canonical(other)
        if language is None:
            raise DataError(f"{path}: {other} is not the code of a language other than English, such as de or pt_BR")
        if kind == sides[1]:
            _file_of_side(path, sides, 0)
        else:
            parts[_SPLIT_NAMES[match[1]]][language].append(_Part(path, sides, kind))
    log_ignored(unused, folder, "files without a name such as train.de-en.tsv", log)
    return {name: dict(sorted(languages.items())) for name, languages in parts.items()}


def _codes(pair: str, path: Path) -> tuple[str, str]:
    """Returns both codes of a language pair; the other than English may have hyphens."""
    if pair.startswith("en-"):
        return "en", pair.removeprefix("en-")
    if pair.endswith("-en"):
        return pair.removesuffix("-en"), "en"
    raise DataError(f"{path} has no English side; each pair needs one, such as de-en")


def _file_of_side(path: Path, sides: tuple[str, str], side: int) -> Path:
    """Returns the file of a side beside that of the other, compressed or not. Raises DataError if there is none."""
    name = f"{path.name.split('.')[0]}.{'-'.join(sides)}.{sides[side]}"
    for other in (path.with_name(name), path.with_name(f"{name}.gz")):
        if other.exists():
            return other
    raise DataError(f"{path} has no other side {name}")


def _cleaned(language: str, raw: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    return clean(((language, english, text) for english, text in raw), fewest=1).get(language, [])


def _texts(parts: Sequence[_Part]) -> Iterator[tuple[str, str]]:
    """Yields all (English, translation); a side may be empty. Raises DataError for a file that cannot be read."""
    for part in parts:
        read = _READERS.get(part.kind, _read_sides)
        at_english = part.sides.index("en")
        with naming(part.path):
            for sides in read(part):
                yield sides[at_english].strip(), sides[1 - at_english].strip()


def _read_sides(part: _Part) -> Iterator[Sequence[str]]:
    first, second = part.path, _file_of_side(part.path, part.sides, 1)
    with naming(second):
        others = read_lines(second)
    lines = read_lines(first)
    if len(lines) != len(others):
        raise DataError(
            f"{first} has {len(lines)} lines and {second.name} {len(others)}; line n of one translates line n of the "
            "other"
        )
    return zip(lines, others, strict=True)


def _read_tsv(part: _Part) -> Iterator[Sequence[str]]:
    for number, line in enumerate(read_lines(part.path), 1):
        if line:
            sides = line.split("\t")
            if len(sides) != 2:
                raise ValueError(f"line {number} has {len(sides)} columns, not 2")
            yield sides


def _read_rows(part: _Part) -> Iterator[Sequence[str]]:
    """Yields the sides of the rows of a .jsonl or a .parquet file."""
    for where, row in read_json_lines(part.path) if part.kind == "jsonl" else _parquet_rows(part.path):
        texts = row["translation"] if isinstance(row, dict) and "translation" in row else row
        yield [text_of(texts, side, where) for side in part.sides]


def _parquet_rows(path: Path) -> Iterator[tuple[str, Any]]:
    rows = (row for batch in pq.ParquetFile(path).iter_batches() for row in batch.to_pylist())
    return ((f"row {number}", row) for number, row in enumerate(rows, 1))


_READERS: dict[str, Callable[[_Part], Iterator[Any]]] = {"tsv": _read_tsv, "jsonl": _read_rows, "parquet": _read_rows}
