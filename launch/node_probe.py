"""What a node has: installed packages, and whether a folder is one place for it and other nodes. It imports nothing but
the standard library, because a node may lack the rest."""

from __future__ import annotations

import importlib.metadata
import re
import time
import tomllib
from contextlib import suppress
from pathlib import Path

MISSING = "there is no such folder; mount the share there, or make the folder"

SETTLE_S = 4.0
"""Seconds until a file written on another node must be visible: NFS caches directory entries for at least 3 s."""


def installed_versions(names: list[str]) -> dict[str, str | None]:
    """Returns the version of each package, None for one that is not installed."""
    found = {name: next(iter(importlib.metadata.distributions(name=name)), None) for name in names}
    return {name: package.version if package else None for name, package in found.items()}


def pinned_versions() -> dict[str, str]:
    """Returns the versions of the suite's direct dependencies that are pinned, from the checkout or as installed."""
    project = Path(__file__).parents[1] / "pyproject.toml"
    if project.exists():
        requirements = tomllib.loads(project.read_text())["project"]["dependencies"]
    else:
        requirements = importlib.metadata.requires("gpipe-suite") or []
    pins = (re.fullmatch(r"([\w.-]+)(?:\[.*\])?==([\w.]+)", line) for line in requirements)
    return {pin[1]: pin[2] for pin in pins if pin}


def same_version(found: str | None, pinned: str) -> bool:
    """Returns whether an installed version is the pinned one; a suffix such as +cpu is no other version."""
    return (found or "").split("+")[0] == pinned


def folder_of(location: str) -> str:
    """Returns the path of a folder, given as a path or as file://; an empty text for the URL of an object store."""
    scheme, _, path = location.rpartition("://")
    return path if scheme in ("", "file", "local") else ""


def write_marker(folder: str, name: str) -> str:
    """Writes a file with its own name as text; returns why that failed. A missing folder is not created: that would
    hide a missing mount."""
    if not Path(folder).is_dir():
        return MISSING
    try:
        (Path(folder) / name).write_text(name)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _has_marker(folder: str, name: str) -> bool:
    """Returns whether a marker can be read and has its own name as text."""
    try:
        return (Path(folder) / name).read_bytes() == name.encode()
    except OSError:
        return False


def unseen_markers(folder: str, names: list[str], timeout_s: float) -> list[str]:
    """Returns the markers that cannot be read in time."""
    until = time.monotonic() + timeout_s
    while True:
        unseen = [name for name in names if not _has_marker(folder, name)]
        if not unseen or time.monotonic() >= until:
            return unseen
        time.sleep(0.2)


def remove_markers(folder: str, names: list[str]) -> None:
    for name in names:
        with suppress(OSError):
            (Path(folder) / name).unlink()
