"""``make report``: what the runs of a sweep came to, from their records and scores alone."""

from __future__ import annotations

from rich.console import Console

from experiments.cluster import Cluster
from experiments.sweep import Sweep, folder_name
from experiments.sweeps import SWEEPS, find_scale, find_sweep
from launch.devices import this_machine
from launch.runs import RUNS
from suite.errors import SettingError


def report(name: str, asked: str, console: Console) -> None:
    """Writes the report of a sweep; without a name, of all that have runs. ``auto`` is every scale that has some.

    Raises SettingError for an unknown name or scale, and where there is no run to report on.
    """
    cluster = this_machine()
    found = 0
    for family in [find_sweep(name)] if name else SWEEPS.values():
        scales = (*family.scales, *([""] if not family.scales else []))
        for scale in scales if asked == "auto" else [find_scale(family, asked, cluster)]:
            members = family.members(scale, cluster, RUNS.resolve())
            if any((RUNS / member.folder / "record.json").exists() for member in members):
                write_report(family, scale, cluster, console)
                found += 1
    if not found:
        what = f"the sweep {name}" if name else "any sweep"
        raise SettingError(f"no run of {what} is finished yet; make sweep NAME={name or 'depth_width'} makes some")


def write_report(family: Sweep, scale: str, cluster: Cluster, console: Console) -> None:
    """Writes one report and says where it is."""
    places = family.page(scale, cluster, RUNS).write(RUNS / folder_name(family.name, scale))
    console.print(f"report: {' and '.join(map(str, places))}")
