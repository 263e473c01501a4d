"""Software localisation catalogues: compiled gettext files and Home Assistant's JSON, read from folders or wheels.

A catalogue gives pairs (language, English, translation), raw: markup and placeholders are still in them.
Wheels are read as the zip files they are, never installed.
"""

from __future__ import annotations

import ast
import json
import re
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from suite.data.languages import canonical
from suite.errors import DataError

Pair = tuple[str, str, str]
"""(language, English, translation)"""

_MAGIC = {0x950412DE: "<", 0xDE120495: ">"}
_CHARSET = re.compile(rb"charset=([\w-]+)")
_DEFAULT = re.compile(r'^#\. Default: (".*")$\n(?:^#.*\n)*^msgid (".*"(?:\n".*")*)$', re.MULTILINE)
_JSON_NAME = re.compile(r"(?P<folder>.*components/[^/]+/translations)/(?P<part>\w+\.)?(?P<code>[\w-]+)\.json")


def read_mo(data: bytes, name: str) -> Iterator[tuple[str, str]]:
    """Yields (English, translation) of a compiled catalogue; ``name`` is for messages.

    Of plural forms the singular goes with form 0 and the plural with the last; a context before the message is dropped.
    Raises DataError when the bytes are no compiled catalogue.
    """
    order = _MAGIC.get(int.from_bytes(data[:4], "little"))
    if order is None:
        raise DataError(f"{name} is not a compiled gettext catalogue: it starts with {data[:4]!r}; fetch it again")
    try:
        count, sources, targets = struct.unpack_from(f"{order}3I", data, 8)
        source_table = struct.unpack_from(f"{order}{2 * count}I", data, sources)
        target_table = struct.unpack_from(f"{order}{2 * count}I", data, targets)
    except struct.error as error:
        raise DataError(
            f"{name} is a truncated gettext catalogue of {len(data)} bytes ({error}); fetch it again"
        ) from None
    charset = "utf-8"
    for i in range(0, 2 * count, 2):
        source = data[source_table[i + 1] : source_table[i + 1] + source_table[i]]
        target = data[target_table[i + 1] : target_table[i + 1] + target_table[i]]
        if not source:  # the header is the translation of the empty string
            found = _CHARSET.search(target)
            charset = found.group(1).decode() if found else charset
            continue
        english = source.decode(charset, "replace").rpartition("\x04")[2].split("\0")
        forms = target.decode(charset, "replace").split("\0")
        yield english[0], forms[0]
        if len(english) > 1:
            yield english[-1], forms[-1]


def read_defaults(text: str) -> dict[str, str]:
    """Returns {message key: English} of a template that names messages by key and says the English in a comment."""
    defaults = {}
    for english, key in _DEFAULT.findall(text):
        try:
            defaults["".join(map(ast.literal_eval, key.split("\n")))] = ast.literal_eval(english)
        except (SyntaxError, ValueError):  # a comment is free text; one that is no string literal names no English
            continue
    return defaults


def _leaves(node: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    if isinstance(node, str):
        yield path, node
    elif isinstance(node, dict):
        for key, value in node.items():
            yield from _leaves(value, (*path, key))


class _Source:
    """A folder or a wheel, as names and a way to read them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.read: Callable[[str], bytes]
        if path.is_dir():
            self.names = sorted(file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file())
            self.read = lambda name: (path / name).read_bytes()
        else:
            try:
                wheel = zipfile.ZipFile(path)
            except zipfile.BadZipFile:
                raise DataError(f"{path} is not a wheel; delete it and run again, it will be fetched anew") from None
            self.names = sorted(wheel.namelist())
            self.read = wheel.read


def read_catalogues(path: Path) -> Iterator[Pair]:
    """Yields the raw pairs of every catalogue in a folder or a wheel, in the order of their names.

    Raises DataError when the wheel or a catalogue in it cannot be read.
    """
    source = _Source(path)
    yield from _gettext_pairs(source)
    yield from _json_pairs(source)


def _gettext_pairs(source: _Source) -> Iterator[Pair]:
    defaults: dict[str, str] = {}
    for name in source.names:
        if name.endswith(".pot"):
            defaults |= read_defaults(source.read(name).decode("utf-8", "replace"))
    for name in source.names:
        parts = PurePosixPath(name)
        if not parts.match("*/LC_MESSAGES/*.mo"):
            continue
        language = canonical(parts.parts[-3])
        if language is None:
            continue
        for english, translation in read_mo(source.read(name), f"{source.path}/{name}"):
            yield language, defaults.get(english, english), translation


def _json_pairs(source: _Source) -> Iterator[Pair]:
    english: dict[tuple[str, str], dict[tuple[str, ...], str]] = {}
    others: list[tuple[tuple[str, str], str, str]] = []
    for name in source.names:
        match = _JSON_NAME.fullmatch(name)
        if match is None:
            continue
        where = (match["folder"], match["part"] or "")
        language = canonical(match["code"])
        if match["code"] == "en":
            english[where] = dict(_leaves(json.loads(source.read(name))))
        elif language is not None:
            others.append((where, language, name))
    for where, language, name in others:
        texts = english.get(where, {})
        for path, translation in _leaves(json.loads(source.read(name))):
            if path in texts:
                yield language, texts[path], translation
