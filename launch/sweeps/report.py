"""``make report``: the report of a sweep, made from the records and scores of its runs."""

from __future__ import annotations

from rich.console import Console

from experiments.base.cluster import Cluster
from experiments.sweeps.members.base import Sweep, folder_name
from experiments.sweeps.registry import SWEEPS, find_scale, find_sweep
from launch.runs.store import RUNS
from launch.worker.devices import this_machine
from suite.errors import SettingError


def report(name: str, scale_name: str, console: Console) -> None:
    """Writes the report of a sweep; without a name, of all sweeps with runs. ``auto`` is every scale with runs.

    Raises SettingError for an unknown name or scale, and if no run is finished.
    """
    cluster = this_machine()
    written = 0
    for family in [find_sweep(name)] if name else SWEEPS.values():
        scales = (*family.scales, *([""] if not family.scales else []))
        for scale in scales if scale_name == "auto" else [find_scale(family, scale_name, cluster)]:
            members = family.members(scale, cluster, RUNS.resolve())
            if any((RUNS / member.folder / "record.json").exists() for member in members):
                write_report(family, scale, cluster, console)
                written += 1
    if not written:
        what = f"the sweep {name}" if name else "any sweep"
        raise SettingError(f"no run of {what} is finished yet; start some with make sweep NAME={name or 'depth_width'}")


def write_report(family: Sweep, scale: str, cluster: Cluster, console: Console) -> None:
    """Writes one report and prints its paths."""
    paths = family.page(scale, cluster, RUNS).write(RUNS / folder_name(family.name, scale))
    console.print(f"report: {' and '.join(map(str, paths))}")
