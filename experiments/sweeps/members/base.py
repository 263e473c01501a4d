"""A sweep: a named family of runs that are compared with each other. ``launch/sweeps/`` runs its members.

runs/depth_width-laptop/t12_400m-0/    a member is a run; a member of two sweeps has one folder and runs once
runs/depth_width-laptop/report.html    the report
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from experiments.base.cluster import Cluster
from experiments.base.experiment import Experiment
from experiments.report.page import Page
from experiments.report.table import Table
from suite.errors import RunFileError
from suite.paths import read_json


@dataclass(frozen=True)
class Scoring:
    """How to score a member's translations: beam width, test pairs per direction (None for all), and languages (None
    for all that it was trained on)."""

    beam: int
    max_pairs: int | None
    languages: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Member:
    """One run of a sweep. Members with the same label differ only in their seed."""

    folder: str
    """Below the folder of all runs, such as ``depth_width-laptop/t12_400m-0``."""
    label: str
    experiment: Experiment
    scoring: Scoring | None = None
    """None: the run's record is enough."""
    after: str | None = None
    """The folder of a member to train first, because this one starts from its weights."""
    priority: int = 0
    """Members with a higher priority run first; among equals, those that need more devices."""


class Sweep(Protocol):
    """The interface of a sweep."""

    @property
    def name(self) -> str:
        """The sweep's name."""

    @property
    def scales(self) -> Sequence[str]:
        """Its scales, the one for small machines first."""

    def members(self, scale: str, cluster: Cluster, runs: Path) -> list[Member]:
        """Returns its runs at one of its scales, below the folder of all runs."""

    def page(self, scale: str, cluster: Cluster, runs: Path) -> Page:
        """Returns the report of the finished runs."""

    def tables(self, scale: str, cluster: Cluster, runs: Path) -> list[Table]:
        """Returns the page's tables to show in the terminal."""


def folder_name(name: str, scale: str) -> str:
    """Returns the name of the folder of a sweep at a scale."""
    return f"{name}-{scale}" if scale else name


def read_record(folder: Path, name: str = "record.json") -> dict[str, Any] | None:
    """Returns a run's record; None without one and for a damaged one, which the report names."""
    try:
        return read_json(folder / name)
    except RunFileError:
        return None
