"""The packages that a run needs, pinned to the versions that the suite is tested with."""

from __future__ import annotations

import importlib.metadata
import tomllib
from contextlib import suppress
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def pinned_requirements(root: Path) -> dict[str, str]:
    """Returns package -> version: the suite's direct and indirect dependencies that constraints.txt pins.

    Development tools are not included. Indirect dependencies are read from the packages installed here.
    """
    constraints = [Requirement(line) for line in (root / "constraints.txt").read_text().splitlines() if line.strip()]
    pinned = {str(canonicalize_name(pin.name)): next(iter(pin.specifier)).version for pin in constraints}
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    waiting = [Requirement(line) for line in project["dependencies"]]
    needed: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        requirement = waiting.pop()
        name, extras = str(canonicalize_name(requirement.name)), frozenset(requirement.extras)
        if (name, extras) in needed:
            continue
        needed.add((name, extras))
        with suppress(importlib.metadata.PackageNotFoundError):  # for another platform
            for dependency in map(Requirement, importlib.metadata.requires(name) or []):
                marker = dependency.marker
                if marker is None or any(marker.evaluate({"extra": extra}) for extra in {"", *extras}):
                    waiting.append(dependency)
    return {name: pinned[name] for name in sorted({name for name, _ in needed}) if name in pinned}
