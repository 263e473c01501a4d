"""A sweep: a named family of runs that are compared with each other. What is to be run is data; ``launch/sweeps/``
runs it.

    runs/depth_width-laptop/t12_400m-0/    a member is a run; one that two sweeps need has one folder and is run once
    runs/depth_width-laptop/report.html    what came of them
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from experiments.cluster import Cluster
from experiments.experiment import Experiment
from experiments.page import Page
from experiments.table import Table


@dataclass(frozen=True)
class Scoring:
    """How a member's translations are scored: beam width, and test pairs a direction (None for all)."""

    beam: int
    max_pairs: int | None


@dataclass(frozen=True)
class Member:
    """One run of a sweep. Members with the same label differ in their seed alone."""

    folder: str
    """Below the folder of all runs, such as ``depth_width-laptop/t12_400m-0``."""
    label: str
    experiment: Experiment
    scoring: Scoring | None = None
    """None: its record has all that is wanted of it."""
    after: str | None = None
    """The folder of a member that is trained before, because this one begins with its weights."""
    priority: int = 0
    """Members with a higher one go first; of equal ones, those that need more devices."""


class Sweep(Protocol):
    """What a family of runs has to say of itself."""

    @property
    def name(self) -> str:
        """What it is called."""

    @property
    def scales(self) -> Sequence[str]:
        """The scales it knows, the one that small machines take first."""

    def members(self, scale: str, cluster: Cluster, runs: Path) -> list[Member]:
        """Returns its runs at one of its scales, below the folder of all runs."""

    def page(self, scale: str, cluster: Cluster, runs: Path) -> Page:
        """Returns what the runs that are finished came to."""

    def tables(self, scale: str, cluster: Cluster, runs: Path) -> list[Table]:
        """Returns the page's tables that are worth a look at the terminal."""


def folder_name(name: str, scale: str) -> str:
    """Returns the name of the folder of a sweep at a scale."""
    return f"{name}-{scale}" if scale else name
