"""Transfer to a low-resource language: alone, with relatives, with unrelated languages, by its number of pairs."""

from __future__ import annotations

from pathlib import Path

from experiments.base.cluster import Cluster
from experiments.report.page import Page
from experiments.report.table import Table
from experiments.sweeps.members.base import Member
from experiments.sweeps.members.low_resource import NAME, RULES, low_resource_members


class LowResource:
    """The sweep on a low-resource language."""

    name = NAME
    scales: tuple[str, ...] = tuple(RULES)

    def members(self, scale: str, cluster: Cluster, runs: Path) -> list[Member]:
        """Returns the runs that can be chosen by now: the bilingual ones follow after tuning."""
        return low_resource_members(scale, cluster, runs)

    def page(self, scale: str, cluster: Cluster, runs: Path) -> Page:
        """Returns the report of the finished runs."""
        return Page("Low-resource", [])

    def tables(self, scale: str, cluster: Cluster, runs: Path) -> list[Table]:
        """Returns the page's tables."""
        return []


SWEEP = LowResource()
