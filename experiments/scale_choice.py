"""Which scale a run gets: what is asked for, or what the devices at hand can hold."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from experiments.cluster import GIB, Cluster
from experiments.experiment import Experiment
from experiments.planning import attempt, estimated_price, least_memory, make
from experiments.scales import laptop, onto, with_changes
from experiments.tasks import workload
from experiments.workload import Workload
from suite.errors import PlacementError, PlanError, SettingError

Asked = Literal["auto", "paper", "laptop"]


def choose_scale(
    paper: Experiment, asked: Asked, cluster: Cluster, settings: Iterable[str] = ()
) -> tuple[Experiment, str]:
    """Returns the experiment at the scale asked for, a person's settings applied, and one line saying what was shrunk.

    ``auto`` takes the paper's numbers where the cluster holds them and laptop elsewhere. Raises PlacementError when
    ``paper`` is asked for and the cluster does not hold it, SettingError for a bad setting.
    """
    settings = list(settings)
    if paper.scale == "laptop":
        if asked == "paper":
            raise SettingError(f"{paper.name} is no run of the paper's and has no scale paper; leave SCALE out")
        chosen = onto(paper.with_settings(settings), cluster)
        changed = f"shrunk: {', '.join(chosen.shrunk)}" if chosen.shrunk else "nothing shrunk"
        return chosen, f"{paper.name} as it is, {changed}"
    if asked == "laptop":
        return _shrunk(paper, cluster, settings, "as asked")
    try:
        whole = paper.with_settings(settings)
    except SettingError as fault:
        if asked == "paper":
            raise
        return _shrunk(paper, cluster, settings, f"as at scale paper {fault}")  # raises again if wrong at any scale
    lack = find_lack(whole, cluster)
    if lack is None:
        return whole, f"{paper.name} at scale paper, nothing shrunk"
    if asked == "paper":
        raise PlacementError(f"SCALE=paper of {paper.name} {lack}; {_mend(whole, cluster)}, or SCALE=laptop")
    return _shrunk(paper, cluster, settings, f"as paper {lack}")


def find_lack(experiment: Experiment, cluster: Cluster) -> str | None:
    """Returns what is needed to run these numbers and what there is; None when the cluster holds them.

    Bytes are estimated on the meta device (``suite.pipeline.estimate``).
    """
    work, pipeline = workload(experiment), experiment.pipeline
    if cluster.kind == "gpu" and _fits(work, cluster):
        return None
    enough = _boundless(experiment)
    try:
        attempt(work, enough, estimated_price)
    except PlanError as fault:
        return f"cannot run as it is set: {'; '.join(fault.faults)}"
    least = least_memory(work, enough)
    assert least is not None, "the run fits devices without a bound"
    return (
        f"needs {enough.devices} GPUs (K = {pipeline.stages} stages x R = {pipeline.replicas} replicas) "
        f"with {least / GIB:.1f} GiB each at the least, and there are {cluster}"
    )


def _fits(work: Workload, cluster: Cluster) -> bool:
    try:
        attempt(work, cluster, estimated_price)
    except PlanError:
        return False
    return True


def _mend(experiment: Experiment, cluster: Cluster) -> str:
    """Returns what to do about a lack: the first plan that fits, if there are devices for one."""
    try:
        make(workload(experiment), cluster if cluster.kind == "gpu" else _boundless(experiment), estimated_price)
    except PlanError as fault:
        if fault.remedies:
            return f"use {fault.remedies[0].partition(':')[0]}"
    return "use a cluster that has them"


def _boundless(experiment: Experiment) -> Cluster:
    """Returns as many devices as are asked for, large enough for anything."""
    return Cluster(experiment.pipeline.stages * experiment.pipeline.replicas, 2**62, "gpu")


HEADLINES = (
    *("model.width", "model.feed_forward", "model.heads", "model.filters"),
    *("text.", "images.source", "images.size", "pipeline.", "train.batch", "train.steps"),
)
"""Beginnings of the settings whose change is said in the one line; all of them stand in ``shrunk``."""


def _shrunk(paper: Experiment, cluster: Cluster, settings: list[str], why: str) -> tuple[Experiment, str]:
    small = with_changes(paper, laptop(paper, cluster).with_settings(settings))
    said = [line for line in small.shrunk if line.startswith(HEADLINES)]
    rest = len(small.shrunk) - len(said)
    line = f"{paper.name} at scale laptop, {why}: {', '.join(said)}, and {rest} more in experiment.toml"
    return small, line
