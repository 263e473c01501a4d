"""English prose without a download from a hub: the docstrings of Python packages.

``docstrings``   nine packages (57 MB), which pip fetches by hash and which are not installed
``django``       the installed Django; needs no download

A module's docstrings are one document. Kept are paragraphs of words: sections of parameters and examples, tables and
code are not prose. A paragraph that several modules have is kept once.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import warnings
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from suite.data.wheels import fetch_wheels
from suite.errors import DataError
from suite.log import Log

DOCSTRINGS, DJANGO = "docstrings", "django"
REQUIREMENTS = Path(__file__).with_name("docstrings.txt")
_PLATFORM = ("--platform", "manylinux2014_x86_64", "--python-version", "3.11", "--implementation", "cp")

_FEWEST_WORDS = 8
_OTHERS = 0.15
"""Largest share of characters of prose that are neither letters nor blanks."""
_OTHER = re.compile(r"[\W\d_](?<! )")
_WORD = re.compile(r"[^\W\d_]{2,}")
_ROLE = re.compile(r":[a-z:+]+:`~?([^`<]*?)(?:\s*<[^`]*>)?`")
_DIRECTIVE = re.compile(r"^\.\. [\w-]+::.*$", re.MULTILINE)
_HAS_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def read_docstrings(corpus: str, cache: Path, log: Log) -> list[str]:
    """Returns the documents of ``docstrings`` or ``django``.

    Raises UnreachableError when the packages cannot be fetched, DataError when one cannot be read.
    """
    if corpus == DJANGO:
        sources: list[Path] = [_django()]
    else:
        what = "packages with docstrings (57 MB)"
        sources = fetch_wheels(cache / "docstring-wheels", REQUIREMENTS, what, log, _PLATFORM)
    seen: set[str] = set()
    documents = []
    for source in sources:
        for module in _modules(source):
            if text := _document(module, seen):
                documents.append(text)
    return documents


def _modules(source: Path) -> Iterator[bytes]:
    """Yields the source of each module of a package's folder or wheel, sorted by name, without tests."""
    if source.is_dir():
        for path in sorted(source.rglob("*.py")):
            yield path.read_bytes()
        return
    try:
        with zipfile.ZipFile(source) as wheel:
            for name in sorted(wheel.namelist()):
                if name.endswith(".py") and "/tests/" not in name and "/test_" not in name:
                    yield wheel.read(name)
    except zipfile.BadZipFile:
        raise DataError(f"{source} is not a wheel; delete it and run again to fetch it anew") from None


def _document(module: bytes, seen: set[str]) -> str:
    """Returns a module's prose, one paragraph after the other; adds its paragraphs to ``seen``."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of old escape sequences
            tree = ast.parse(module)
    except (SyntaxError, ValueError):  # a template or another version of Python
        return ""
    docstrings = [text for node in _definitions(tree) if (text := ast.get_docstring(node))]
    new = [text for text in _prose(docstrings) if text not in seen and not seen.add(text)]  # type: ignore[func-returns-value]
    return "\n\n".join(new)


def _definitions(node: Any) -> Iterator[Any]:
    """Yields a module and its classes and functions, also nested ones. ``ast.walk`` takes ten times as long, because
    it visits all expressions."""
    if isinstance(node, _HAS_DOCSTRING):
        yield node
    for field in ("body", "orelse", "handlers", "finalbody"):
        children = getattr(node, field, ())
        for child in children if isinstance(children, list) else ():
            yield from _definitions(child)


def _prose(docstrings: Iterable[str]) -> Iterator[str]:
    """Yields the paragraphs that are prose, each on one line, without the markup of roles and directives."""
    for docstring in docstrings:
        plain = _ROLE.sub(r"\1", _DIRECTIVE.sub("", docstring)).replace("``", "").replace("`", "")
        for paragraph in re.split(r"\n\s*\n", plain):
            text = " ".join(paragraph.split())
            others = len(_OTHER.findall(text))
            if len(_WORD.findall(text)) >= _FEWEST_WORDS and others <= _OTHERS * len(text) and ">>>" not in text:
                yield text


def _django() -> Path:
    package = importlib.util.find_spec("django")
    if package is None or not package.submodule_search_locations:
        raise DataError("the corpus django needs the package django, which is not installed: pip install django")
    return Path(package.submodule_search_locations[0])
