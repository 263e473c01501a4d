"""A folder of your own text: files .txt, .md and .rst are one document each; a line of .jsonl and a row of .parquet
has its document under ``text``.

    notes/a.md  notes/b.txt             documents; ``splitting`` holds some of them out
    train.jsonl  valid.txt  test/c.rst  files and folders named train, valid (dev, validation) or test are used as such
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from suite.errors import DataError, first_line
from suite.log import Log

TRAIN, VALID, TEST = "train", "valid", "test"
SPLITS = (TRAIN, VALID, TEST)

_SPLIT_NAMES = {"train": TRAIN, "valid": VALID, "dev": VALID, "validation": VALID, "test": TEST}
_SPLIT_NAME = re.compile(rf"({'|'.join(_SPLIT_NAMES)})(?![a-z])", re.IGNORECASE)

Documents = list[str]


def read_folder(name: str, log: Log) -> dict[str | None, Documents]:
    """Returns the documents by split; under None those of a folder without train files, which are split later.

    Raises DataError for a folder without text, files that cannot be read, and train files without valid or test files.
    """
    folder = Path(name)
    paths = [
        path
        for path in sorted(folder.rglob("*"))
        if path.suffix.lower() in _READERS and not any(p.startswith(".") for p in path.relative_to(folder).parts)
    ]
    by_split: defaultdict[str | None, Documents] = defaultdict(list)
    for path in paths:
        texts = [text.replace("\r\n", "\n").strip() for text in _read(path)]
        by_split[_split_of(path.relative_to(folder))] += filter(None, texts)
    if TRAIN not in by_split:
        documents = [text for texts in by_split.values() for text in texts]
        if not documents:
            raise DataError(
                f"{name} has no text ({len(paths)} files {', '.join(_READERS)}); name a folder with documents"
            )
        return {None: documents}
    if not (by_split[VALID] or by_split[TEST]):
        raise DataError(
            f"{name} has train files but no valid or test files with text; add them, or rename the train files, and "
            "whole documents are held out"
        )
    if ignored := len(by_split.pop(None, [])):
        log(f"{ignored} documents of {name} are not used: their files are named neither train, valid nor test")
    return dict(by_split)


def _split_of(path: Path) -> str | None:
    match = _SPLIT_NAME.match(path.parts[0])
    return _SPLIT_NAMES[match[1].lower()] if match else None


def _read(path: Path) -> Iterator[str]:
    try:
        yield from _READERS[path.suffix.lower()](path)
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 (byte {error.start}: {error.reason}); convert it") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} cannot be read: {type(error).__name__}: {first_line(error)}") from error


def _read_text(path: Path) -> Iterator[str]:
    yield path.read_bytes().decode("utf-8-sig")


def _read_jsonl(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line) if line.strip() else {"text": ""}
            except json.JSONDecodeError as error:
                raise ValueError(f"line {number} is not JSON: {error.msg}") from None
            if not isinstance(row, dict) or not isinstance(row.get("text"), str):
                raise ValueError(f'line {number} has no text under "text"')
            yield row["text"]


def _read_parquet(path: Path) -> Iterator[str]:
    file = pq.ParquetFile(path)
    schema = file.schema_arrow
    if "text" not in schema.names:
        raise ValueError(f"it has the columns {', '.join(schema.names)}, and none is called text")
    kind = schema.field("text").type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise ValueError(f"its column text has values of type {kind}, not strings")
    for batch in file.iter_batches(columns=["text"]):
        yield from (text or "" for text in batch["text"].to_pylist())


_READERS: dict[str, Callable[[Path], Iterator[str]]] = {
    ".txt": _read_text, ".md": _read_text, ".rst": _read_text, ".jsonl": _read_jsonl, ".parquet": _read_parquet,
}  # fmt: skip
