"""A folder of your own text: files .txt, .md and .rst are one document each; a line of .jsonl and a row of .parquet
has its document under ``text``.

    notes/a.md  notes/b.txt             documents; ``splitting`` holds some of them out
    train.jsonl  valid.txt  test/c.rst  files and folders named train, valid (dev, validation) or test are used as such
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from suite.data.user_files import log_ignored, naming, read_json_lines, read_text, text_of, visible_files
from suite.errors import DataError
from suite.log import Log

TRAIN, VALID, TEST = "train", "valid", "test"

_SPLIT_NAMES = {"train": TRAIN, "valid": VALID, "dev": VALID, "validation": VALID, "test": TEST}
_SPLIT_NAME = re.compile(rf"({'|'.join(_SPLIT_NAMES)})(?![a-z])", re.IGNORECASE)


def read_folder(name: str, log: Log) -> dict[str | None, list[str]]:
    """Returns the documents by split; under None those of a folder without train files, which are split later.

    Raises DataError for a folder without text, files that cannot be read, and train files without valid or test files.
    """
    folder = Path(name)
    files = visible_files(folder, log)
    paths = [path for path in files if path.suffix.lower() in _READERS]
    log_ignored(sorted({*files} - {*paths}), folder, f"files that are not {', '.join(_READERS)}", log)
    by_split: defaultdict[str | None, list[str]] = defaultdict(list)
    empty = 0
    for path in paths:
        with naming(path):
            texts = [text.replace("\r\n", "\n").strip() for text in _READERS[path.suffix.lower()](path)]
        match = _SPLIT_NAME.match(path.relative_to(folder).parts[0])
        by_split[_SPLIT_NAMES[match[1].lower()] if match else None] += filter(None, texts)
        empty += texts.count("")
    if empty:
        log(f"dropped {empty} empty documents of {name}")
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
    return {split: texts for split, texts in by_split.items() if texts or split == TRAIN}


def _read_jsonl(path: Path) -> Iterator[str]:
    for where, row in read_json_lines(path):
        yield text_of(row, "text", where)


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


_READERS: dict[str, Callable[[Path], Iterable[str]]] = {
    **dict.fromkeys((".txt", ".md", ".rst"), lambda path: [read_text(path)]),
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
}
