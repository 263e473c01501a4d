"""Where the text comes from.

``catalogues``   seven packages' translations, fetched by pip with their hashes and read without installing them
``django``       the translations of the installed Django; needs no fetch
``owner/name``   a translation set on the Hugging Face hub, in the layout of ``Helsinki-NLP/opus-100``, or a folder with
                 that layout; read by ``suite.data.hub``
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path

from suite.data.catalogues import Pair, read_catalogues
from suite.data.wheels import fetch_wheels
from suite.errors import DataError, nearest

CATALOGUES, DJANGO = "catalogues", "django"
REQUIREMENTS = Path(__file__).with_name("catalogues.txt")
Say = Callable[[str], None]


def check_corpus(name: str) -> None:
    """Raises DataError with the nearest names when ``name`` is no corpus."""
    if name not in (CATALOGUES, DJANGO) and "/" not in name:
        raise DataError(
            f"there is no corpus {name!r}; {nearest(name, (CATALOGUES, DJANGO))} "
            "A translation set on the hub is named owner/name, such as Helsinki-NLP/opus-100"
        )


def read_corpus(name: str, cache: Path, say: Say) -> Iterator[Pair]:
    """Fetches what ``catalogues`` or ``django`` needs into ``cache`` and returns its raw pairs, which are read as they
    are asked for. A set on the hub is read by ``suite.data.hub``.

    Raises UnreachableError when ``catalogues`` cannot be fetched, DataError for any other name and for a package that
    is not what its hash says.
    """
    if name == DJANGO:
        return read_catalogues(_django())
    if name != CATALOGUES:
        raise DataError(f"{name!r} is not a corpus of catalogues: only {CATALOGUES} and {DJANGO} are")
    what = "packages with translations (96 MB)"
    return _read_wheels(fetch_wheels(cache / "wheels", REQUIREMENTS, what, say))


def _django() -> Path:
    found = importlib.util.find_spec("django")
    if found is None or not found.submodule_search_locations:
        raise DataError("the corpus django is read from the package django, which is not installed: pip install django")
    return Path(found.submodule_search_locations[0])


def _read_wheels(wheels: list[Path]) -> Iterator[Pair]:
    for wheel in wheels:
        yield from read_catalogues(wheel)
