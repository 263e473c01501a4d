"""A sweep: a list of runs, and a function of their records to a report. ``launch/sweeps/`` runs its members.

runs/depth_width-laptop/t12_400m-0/    a member is a run; a member of two sweeps has one folder and runs once
runs/depth_width-laptop/report.html    the report
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from experiments.base.cluster import Cluster
from experiments.report.page import Page, Section
from experiments.report.table import Table
from experiments.sweeps.members.base import Member
from experiments.sweeps.report.results import Results, read_results


class Report(NamedTuple):
    page: Page
    tables: Sequence[Table]
    """Those of the page that the terminal shows."""


@dataclass(frozen=True)
class Sweep:
    name: str
    title: str
    members: Callable[[str, Cluster, Path], list[Member]]
    """Returns its runs at one of its scales, below the folder of all runs. A run with two labels appears twice, with
    one folder."""
    contents: Callable[[Results, Cluster], tuple[list[Section], list[Table]]]
    """Returns the sections of its report, and those of their tables that the terminal shows."""
    scales: tuple[str, ...] = ()
    """Its scales, the one for small machines first."""

    def results(self, scale: str, cluster: Cluster, runs: Path) -> Results:
        return read_results(scale, self.members(scale, cluster, runs), runs)

    def report(self, scale: str, cluster: Cluster, runs: Path) -> Report:
        """Returns the report of the finished runs below the folder of all runs."""
        sections, tables = self.contents(self.results(scale, cluster, runs), cluster)
        warning = "A smoke test: at scale tiny the models learn nothing, and no number here means anything."
        title = f"{self.title}, scale {scale}" if scale else self.title
        return Report(Page(title, sections, warning=warning if scale == "tiny" else ""), tables)
