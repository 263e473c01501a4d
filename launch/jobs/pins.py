"""The packages that a run needs, each at the one version that the suite is tested with."""

from __future__ import annotations

import importlib.metadata
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def pins(root: Path) -> dict[str, str]:
    """Returns package -> version: what the suite depends on, and what that depends on, where constraints.txt pins it.

    Tools of development are left out. Dependencies of dependencies are those of the packages installed here.
    """
    constraints = [Requirement(line) for line in (root / "constraints.txt").read_text().splitlines() if line.strip()]
    pinned = {str(canonicalize_name(one.name)): next(iter(one.specifier)).version for one in constraints}
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    waiting = [Requirement(line) for line in project["dependencies"]]
    needed: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        one = waiting.pop()
        name, extras = str(canonicalize_name(one.name)), frozenset(one.extras)
        if (name, extras) in needed:
            continue
        needed.add((name, extras))
        waiting += _needs(name, extras)
    return {name: pinned[name] for name in sorted({name for name, _ in needed}) if name in pinned}


def _needs(name: str, extras: frozenset[str]) -> list[Requirement]:
    try:
        lines = importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:  # of another platform
        return []
    found = [Requirement(line) for line in lines]
    return [one for one in found if one.marker is None or any(one.marker.evaluate({"extra": e}) for e in {"", *extras})]
