"""``make sweep NAME=...``: trains and scores what is left of a family of runs, then reports.

A member that is finished is skipped, one that was left is taken up again, one that fails is tried again or told at the
end, and the others go on. Everything that a member has to say while it runs is in ``logs/`` of the sweep's folder.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from rich.console import Console

from experiments.cluster import Cluster
from experiments.scale_choice import find_lack
from experiments.scales import onto
from experiments.sweep import Member, folder_name
from experiments.sweeps import find_scale, find_sweep
from experiments.tasks import prepare_data
from launch import interrupts
from launch.runs import CACHE, RUNS, in_job, note, where_jobs_go
from launch.site import site_of
from launch.sweeps.lanes import Room
from launch.sweeps.left import Left, what_is_left
from launch.sweeps.report import write_report
from launch.sweeps.room import Here, OnRay, address_of_ray, connected, devices_of
from launch.sweeps.work import Work
from suite.errors import PlacementError


def sweep(name: str, asked: str, launcher: str, console: Console) -> list[str]:
    """Runs what is left of a sweep, writes its report and returns a sentence for each member that failed.

    Raises SettingError for an unknown name or scale, and for a member whose folder holds another run; PlacementError
    where the scale, or a member, needs devices that are not there.
    """
    family, site = find_sweep(name), site_of(launcher)
    cluster = site.cluster()
    site.close()
    scale = find_scale(family, asked, cluster)
    members = {member.folder: member for member in family.members(scale, cluster, RUNS.resolve())}
    fitted = [_fitted(member, scale, cluster, console) for member in members.values()]
    every = [what_is_left(member) for member in fitted]
    left = [one for one in every if not (one.trained and one.scored)]
    for one in every:
        if one.trained:  # not held by this job, and fetched with what it trains
            note(one.run.path)
    console.print(f"{len(every) - len(left)} of {len(every)} members are finished already")
    work = Work(left, launcher, cluster, RUNS / folder_name(name, scale) / "logs", console)
    command = f"make submit NAME={name} SCALE={scale} {where_jobs_go()}" if in_job() else f"make sweep NAME={name}"
    if left:
        advised = interrupts.advised(lambda: f"{command} goes on with what is left")
        with advised, _room(left, launcher, cluster) as (room, variables):
            work.run(room, variables)
    for table in family.tables(scale, cluster, RUNS):
        console.print(table.shown() if console.is_terminal else table.markdown())
    write_report(family, scale, cluster, console)
    return work.failures


def _fitted(member: Member, scale: str, cluster: Cluster, console: Console) -> Member:
    """Returns a member on the data that can be had and the devices there are."""
    experiment = member.experiment
    if scale == "paper" and (lack := find_lack(experiment, cluster)) is not None:
        raise PlacementError(f"the sweep at SCALE=paper: {experiment.name} {lack}; take SCALE=laptop")
    if scale == "gpu" and cluster.kind != "gpu":
        raise PlacementError(f"the sweep at SCALE=gpu is made for a GPU, and there are {cluster}; take SCALE=laptop")
    data = prepare_data(experiment, CACHE, console.print)
    changed = experiment if data == experiment.data else experiment.with_data(data)
    return replace(member, experiment=onto(changed, cluster))


@contextmanager
def _room(left: Sequence[Left], launcher: str, machine: Cluster) -> Iterator[tuple[Room, dict[str, str]]]:
    """A context with the devices that members share, and what their processes find in their environment.

    Raises PlacementError where a member needs more than there are: it would wait for ever.
    """
    if launcher != "ray":
        if machine.kind == "gpu":
            check_needs(left, machine.devices, f"this machine has {machine.devices} GPUs")
        yield Here(machine.devices), {}
        return
    with connected(max(map(needs, left))) as connection:
        devices = devices_of(connection)
        check_needs(left, devices.total, f"the Ray cluster has {devices}")
        yield OnRay(connection), {"RAY_ADDRESS": address_of_ray()}


def needs(left: Left) -> int:
    """Returns the devices that a member's plan asks for."""
    pipeline = left.member.experiment.pipeline
    return 1 if left.trained else pipeline.stages * pipeline.replicas


def check_needs(left: Sequence[Left], total: int, there: str) -> None:
    """Raises PlacementError where a member needs more devices than there are, free or not."""
    large = [one for one in left if needs(one) > total]
    if large:
        first = max(large, key=needs)
        pipeline = first.member.experiment.pipeline
        more = f", and so do {len(large) - 1} others" if len(large) > 1 else ""
        raise PlacementError(
            f"{first.member.folder} needs {needs(first)} devices (K = {pipeline.stages} stages x R = "
            f"{pipeline.replicas} replicas) and {there}: more than there are{more}; add nodes, or take a smaller scale"
        )
