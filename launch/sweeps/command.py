"""``make sweep``: trains and scores the unfinished members of a sweep, then writes its report. ``make report``: the
report alone.

Finished members are skipped, interrupted ones are resumed, and failed ones are tried once more and then named, while
the others continue. The output of each member is in ``logs/`` of the sweep's folder.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import cache
from operator import attrgetter

from rich.console import Console

from experiments.base.cluster import Cluster
from experiments.base.experiment import Experiment
from experiments.base.hints import command, option
from experiments.report.page import Section
from experiments.scaling.scale_choice import find_shortage, fit_to_cluster
from experiments.sweeps.members.base import Member, folder_name
from experiments.sweeps.registry import SWEEPS, find_scale, find_sweep
from experiments.sweeps.sweep import Sweep
from launch import interrupts
from launch.backends.select import select_backend
from launch.runs.store import CACHE, RUNS, RunFolder, in_job, job_storage
from launch.sweeps.devices import Devices
from launch.sweeps.runner import Runner
from launch.sweeps.tasks import Task, in_order, tasks_of
from launch.watching.run_state import damage
from launch.worker.devices import this_machine, with_available_precision
from suite.errors import DataError, PlacementError, SettingError
from suite.log import Log


def sweep(name: str, scale_name: str, launcher: str, console: Console) -> list[str]:
    """Runs the unfinished members of a sweep, writes its report and returns a sentence for each failed member.

    A sweep may have more members once others are finished, such as the runs of a setting that was tuned: they run too.
    Raises SettingError for an unknown name or scale and for a member whose folder holds another run, PlacementError if
    the scale or a member needs devices that are not available.
    """
    family, backend = find_sweep(name), select_backend(launcher)
    cluster = backend.cluster()
    backend.close()
    scale = find_scale(family, scale_name)
    values = {"NAME": name, "SCALE": scale} if scale else {"NAME": name}
    again = command("submit", **values, **job_storage()) if in_job() else command("sweep", **values)
    failures: list[str] = []
    started: set[Member] = set()
    while tasks := _unfinished(family, scale, cluster, started, console):
        started |= {task.member for task in tasks}
        logs = tasks[0].log.parent
        logs.mkdir(parents=True, exist_ok=True)
        advice = interrupts.interrupt_message(lambda: f"{again} continues with the unfinished members")
        with advice, _devices(tasks, launcher, cluster) as devices:
            console.print(f"{len(tasks)} tasks, {devices.total} devices; their logs are in {logs}")
            runner = Runner(in_order(tasks, devices.total), devices, console)
            runner.run()
        failures += runner.failures
    write_report(family, scale, cluster, console, show_tables=True)
    return failures


def _unfinished(family: Sweep, scale: str, cluster: Cluster, started: set[Member], console: Console) -> list[Task]:
    """Returns the tasks of unfinished members that this command has not started yet."""
    members = {member.folder: member for member in family.members(scale, cluster, RUNS.resolve())}
    log = cache(console.print)  # what holds for all members is printed once
    logs = RUNS / folder_name(family.name, scale) / "logs"
    fitted = [_fitted(member, scale, cluster, log) for member in members.values()]
    tasks = {member: tasks_of(member, logs) for member in fitted}
    pending = [task for member, left in tasks.items() if member not in started for task in left]
    if pending or not started:
        console.print(f"{sum(not left for left in tasks.values())} of {len(tasks)} members are already finished")
    return pending


def _fitted(member: Member, scale: str, cluster: Cluster, log: Log) -> Member:
    """Returns a member adapted to the available data and devices. Raises SettingError if its text lacks a language, or
    has fewer pairs of it than the member asks for."""
    experiment = member.experiment
    if scale == "paper" and (lack := find_shortage(experiment, cluster)) is not None:
        laptop = option("SCALE", "laptop")
        raise PlacementError(f"the sweep does not fit at scale paper: {experiment.name} {lack}; use {laptop}")
    data = experiment.prepare_data(CACHE, log)
    changed = experiment if data == experiment.data else experiment.with_data(data)
    fitted = with_available_precision(with_member_threads(fit_to_cluster(changed, cluster), cluster), cluster, log)
    try:
        prepared = fitted.with_prepared(fitted.data_folder(CACHE))
        errors = [*prepared.setting_errors(), *prepared.data_errors()]
    except SettingError as error:
        errors = [str(error)]
    if errors:
        raise SettingError(f"{member.folder}: {errors[0]}")
    return replace(member, experiment=fitted)


def with_member_threads(experiment: Experiment, cluster: Cluster) -> Experiment:
    """Returns a member's run with one thread per stage on CPU cores, unless it sets its threads. A run of its own takes
    all cores; members share them."""
    if cluster.kind != "cpu" or experiment.train.threads is not None:
        return experiment
    return experiment.with_section("train", threads=1)


@contextmanager
def _devices(tasks: Sequence[Task], launcher: str, machine: Cluster) -> Iterator[Devices]:
    """A context with the devices that members share. Raises PlacementError if a member needs more than exist: it would
    wait for ever."""
    if launcher != "ray":
        if machine.kind == "gpu":
            check_needs(tasks, machine.devices, f"this machine has {machine.devices} GPUs")
        yield Devices(machine.devices, machine.kind == "gpu")
        return
    from launch.backends.ray_connection import Connection
    from launch.sweeps.ray_devices import RayDevices

    with closing(Connection(max(task.devices for task in tasks))) as connection:
        devices = RayDevices(connection)
        check_needs(tasks, devices.total, f"the Ray cluster has {devices.described}")
        yield devices


def check_needs(tasks: Sequence[Task], total: int, description: str) -> None:
    """Raises PlacementError if a member needs more devices than exist, free or not."""
    if large := [task for task in tasks if task.devices > total]:
        first = max(large, key=attrgetter("devices"))
        pipeline = first.member.experiment.pipeline
        more = f"; {len(large) - 1} other members need too many as well" if len(large) > 1 else ""
        raise PlacementError(
            f"{first.member.folder} needs {first.devices} devices (K = {pipeline.stages} stages x R = "
            f"{pipeline.replicas} replicas), but {description}{more}; add nodes, or use a smaller scale"
        )


def report(name: str, scale_name: str, console: Console) -> None:
    """Writes the report of a sweep; without a name, of all sweeps with runs. ``auto`` is every scale with runs.

    Raises SettingError for an unknown name or scale, and if no run is finished; DataError if the runs of the named
    sweep were scored on different test pairs. Without a name that is printed, and the other sweeps have their reports.
    """
    cluster = this_machine()
    written = 0
    every = [family for family in SWEEPS.values() if scale_name in ("auto", *family.scales)] or SWEEPS.values()
    for family in [find_sweep(name)] if name else every:
        for scale in (family.scales or ("",)) if scale_name == "auto" else [find_scale(family, scale_name)]:
            members = family.members(scale, cluster, RUNS.resolve())
            if any((RUNS / member.folder / "record.json").exists() for member in members):
                try:
                    write_report(family, scale, cluster, console)
                except DataError as error:
                    if name:
                        raise
                    console.print(f"no report of {folder_name(family.name, scale)}: {error}")
                written += 1
    if not written:
        what = f"the sweep {name}" if name else "any sweep"
        raise SettingError(
            f"no run of {what} is finished yet; start some with {command('sweep', NAME=name or 'depth_width')}"
        )


def write_report(family: Sweep, scale: str, cluster: Cluster, console: Console, show_tables: bool = False) -> None:
    """Writes one report and prints its paths. Names the damaged files of runs, which it leaves out."""
    found = family.report(scale, cluster, RUNS)
    page = found.page
    for table in found.tables if show_tables else ():
        console.print(table.rich_table() if console.is_terminal else table.markdown())
    members = family.members(scale, cluster, RUNS.resolve())
    damaged = [reason for member in members if (reason := damage(RunFolder(RUNS / member.folder)))]
    if damaged:
        page = replace(page, sections=[Section("Runs that are left out", damaged), *page.sections])
    for reason in damaged:
        console.print(f"a run is left out: {reason}")
    paths = page.write(RUNS / folder_name(family.name, scale))
    console.print(f"report: {' and '.join(map(str, paths))}")
