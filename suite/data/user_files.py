"""Files of a user's own folder: which ones are read, their text, and errors that name them."""

from __future__ import annotations

import gzip
import json
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unicodedata import normalize

import pyarrow as pa

from suite.errors import DataError, first_line
from suite.log import Log

_MOST_NAMES = 5
_SURROGATE = re.compile("[\ud800-\udfff]")


def visible_files(folder: Path, log: Log | None = None) -> list[Path]:
    """Returns the files below a folder in sorted order. Those whose name, or a folder's, begins with a dot are hidden
    and ignored; ``log`` gets their number and names.

    Raises DataError for a folder that cannot be read, a link that leads nowhere, a second way to a folder, a socket or
    a device.
    """
    visible: list[Path] = []
    hidden: list[Path] = []
    seen: dict[tuple[int, int], str] = {}
    for root, folders, names in os.walk(folder, onerror=_refuse, followlinks=True):
        stat = os.stat(root)
        if (before := seen.setdefault((stat.st_dev, stat.st_ino), root)) != root:
            raise DataError(f"{root} and {before} are one folder; remove the link")
        hidden += [Path(root, name) for name in (*folders, *names) if name.startswith(".")]
        folders[:] = [name for name in folders if not name.startswith(".")]
        visible += [Path(root, name) for name in names if not name.startswith(".")]
    for path in visible:
        if not path.is_file():
            raise DataError(f"{path} is neither a file nor a link to one; remove it")
    if log:
        log_ignored(hidden, folder, "hidden files and folders", log)
    return sorted(visible)


def _refuse(error: OSError) -> None:
    raise DataError(f"{error.filename} cannot be read: {error.strerror}") from error


def printable(path: str | Path) -> str:
    """Returns a path as text: bytes that are not UTF-8 by their codes, accents composed, whatever the system does."""
    return normalize("NFC", os.fsencode(path).decode("utf-8", "backslashreplace"))


def log_ignored(paths: Sequence[Path], folder: Path, what: str, log: Log) -> None:
    """Logs one line with the number of paths and the names of the first ones; nothing without any."""
    if paths:
        names = [printable(path.relative_to(folder)) for path in sorted(paths)]
        more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
        log(f"ignored in {folder}: {len(names)} {what} ({', '.join(names[:_MOST_NAMES])}{more})")


def fingerprint(folder: Path) -> list[tuple[str, int, int]]:
    """Returns name, size and time of each file of a source folder, so that a changed one is prepared anew."""
    stats = [(path, path.stat()) for path in visible_files(folder)]
    return [(str(path.relative_to(folder)), stat.st_size, stat.st_mtime_ns) for path, stat in stats]


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Raises DataError with the file's name for errors of reading it."""
    try:
        yield
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path} is not UTF-8 (line {line}, byte {error.start}: {error.reason}); convert it") from None
    except (OSError, EOFError, ValueError, KeyError, TypeError, zlib.error, pa.ArrowException) as error:
        kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
        raise DataError(f"{path} cannot be read: {kind}{first_line(error)}") from error


def read_text(path: Path) -> str:
    """Returns the text of a UTF-8 file, which may be compressed (.gz), without a byte order mark."""
    data = path.read_bytes()
    return (gzip.decompress(data) if path.suffix == ".gz" else data).decode().removeprefix("\ufeff")


def read_lines(path: Path) -> list[str]:
    """Returns the lines of a text. Only line feeds end them: other separators of Unicode may be within a sentence."""
    return [line.removesuffix("\r") for line in read_text(path).removesuffix("\n").split("\n")]


def read_json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    """Yields where a line is and its value; empty lines have none. Raises ValueError for a line that is not JSON."""
    for number, line in enumerate(read_lines(path), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"line {number} is not JSON: {first_line(error)}") from None
        yield f"line {number}", row


def text_of(row: Any, key: str, where: str) -> str:
    """Returns the text of a row under a key; null is an empty text. Raises ValueError for anything else."""
    if not isinstance(row, dict) or key not in row:
        raise ValueError(f'{where} has no text under "{key}"')
    text = "" if row[key] is None else row[key]
    if not isinstance(text, str):
        raise ValueError(f'{where} has a value of type {type(text).__name__} under "{key}", not text')
    if _SURROGATE.search(text):
        raise ValueError(f'{where} has half of a surrogate pair under "{key}"')
    return text
