"""``make submit``: an experiment, a sweep, or a run that is to be taken up again, as a job on a Ray cluster.

name, settings -> package -> address, token, version -> job's name -> probe ----> upload, submit, follow
-------------- all of this before anything is uploaded; each failure one sentence -------------
"""

from __future__ import annotations

import os
import re
import shlex
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from experiments.cluster import GIB, Cluster
from experiments.registry import experiments, find, resolve
from experiments.sweep import folder_name
from experiments.sweeps import SWEEPS, find_scale
from launch import interrupts
from launch.jobs import secrets
from launch.jobs.door import OURS, Door, JobError
from launch.jobs.follow import follow, how_to
from launch.jobs.package import Package, checkout, pack
from launch.jobs.pins import pins
from launch.jobs.preflight import Ground, preflight
from launch.progress import FOLLOWED
from launch.runs import COPIES, JOB, SHARED_CACHE
from suite.errors import PlacementError, SettingError, nearest
from suite.training.checkpoint.object_store import check_url

PASSED_ON = ("WANDB_MODE", "WANDB_BASE_URL", "WANDB_ENTITY")
"""Variables of this machine that a job gets as well; no secrets."""


@dataclass(frozen=True)
class Work:
    """What a job runs: the command line's own words."""

    name: str
    """What the job is called after."""
    command: tuple[str, ...]
    beside: tuple[str, ...] = ()
    """Folders below ``runs/`` that it leaves beside its runs."""


def submit(
    name: str, asked: str, scale: str, settings: str, storage: str, job: str, run: str, send_key: bool, console: Console
) -> int:  # fmt: skip
    """Submits, follows to the end and returns the exit code of the job. ``send_key``: the key of wandb goes to any
    cluster. Raises a SuiteError for whatever would end it there and can be known here."""
    work = work_of(name, scale, settings, run, storage)
    _check_names(job, storage)
    with tempfile.TemporaryDirectory() as place:
        package = pack(checkout(), Path(place) / "package.zip")
        for line in package.lines:
            console.print(line)
        door = Door(asked)
        if not door.asks_for_token():
            console.print(f"{door.address} asks for no token: whoever reaches it can run anything there, and read all")
        if not send_key:
            secrets.check_safe(door)
        job = _free(door, job or f"{work.name}-{time.strftime('%Y%m%d-%H%M%S')}")
        ground = preflight(door, pins(checkout()), storage)
        for line in ground.lines:
            console.print(line)
        _send(door, job, work, package, ground, settings, with_key=True)
    console.print(f"submitted: job {job} on {door.address}; Ctrl-C leaves it running")
    console.print(how_to(door, job))
    return follow(door, job, console)


def submit_doctor(asked: str, storage: str, console: Console) -> int:
    """Has a cluster examined by the doctor, on its head, and returns the exit code. Raises a SuiteError where it cannot
    be let in at all; what is wrong with its nodes the doctor says."""
    _check_names("", storage)
    work = Work("doctor", ("doctor", *(("--storage", storage) if storage else ())))
    with tempfile.TemporaryDirectory() as place:
        package = pack(checkout(), Path(place) / "package.zip")
        door = Door(asked)
        job = _free(door, f"{work.name}-{time.strftime('%Y%m%d-%H%M%S')}")
        ground = preflight(door, pins(checkout()), storage, lenient=True)
        console.print(f"the doctor goes to {door.address} as job {job}")
        _send(door, job, work, package, replace(ground, url=""), "", with_key=False)
    return follow(door, job, console)


def work_of(name: str, scale: str, settings: str, run: str, storage: str = "") -> Work:
    """Returns what is to be run. Raises a SuiteError for an unknown name or scale, or a bad setting."""
    url = storage.rstrip("/") if "://" in storage else ""
    if url and not run and name not in SWEEPS:  # a run that is taken up again keeps its own
        settings = f"{settings} train.checkpoints={url}/checkpoints".strip()
    given = ("--set", settings) if settings else ()
    if run:
        if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", run):
            raise SettingError(f"RUN={run!r} is no run on a cluster's storage: give it as name/id, or by its id")
        return Work(run.rpartition("/")[2], ("resume", run, *given))
    if name in SWEEPS:
        if url:
            raise SettingError(f"a sweep's runs begin from each other's folders: give STORAGE= a folder, not {url}")
        if settings:
            raise SettingError(f"sweep {name} takes no settings: its members have their own; leave SET out")
        chosen = find_scale(SWEEPS[name], scale, Cluster(1, GIB, "cpu"))
        return Work(name, ("sweep", name, "--scale", scale, "--launcher", "ray"), (folder_name(name, chosen),))
    if not name:
        known = ", ".join([*experiments(), *SWEEPS])
        raise SettingError(f"which experiment or sweep? Name one with NAME=, or a run to go on with by RUN=; {known}")
    if name not in experiments():
        raise SettingError(f"no experiment or sweep is called {name}; {nearest(name, [*experiments(), *SWEEPS])}")
    _check_settings(name, scale, settings)
    return Work(name, ("experiment", name, "--scale", scale, *given))


def _check_settings(name: str, scale: str, settings: str) -> None:
    """Raises SettingError for what is wrong whatever the cluster has: only there it is known what fits."""
    if scale not in ("auto", "paper", "laptop"):
        raise SettingError(f"no scale {scale!r}; {nearest(scale, ['auto', 'paper', 'laptop'])}")
    if scale == "paper":
        find(name).with_settings(settings)
        return
    with suppress(PlacementError):
        resolve(name, "laptop", Cluster(64, 64 * GIB, "cpu"), settings)


def _check_names(job: str, storage: str) -> None:
    check_url(storage)
    if job and not re.fullmatch(r"[A-Za-z0-9][\w.-]{0,99}", job):
        raise SettingError(f"JOB={job!r} is no name of a job: letters, digits, and . _ - after the first of them")
    if storage and not re.match("/|[a-z0-9]+://", storage):
        raise SettingError(f"STORAGE={storage!r} is no place that nodes share: give a folder from / on, or a URL")


def _free(door: Door, job: str) -> str:
    """Returns a job's name. Raises JobError where the cluster has a job of it."""
    taken = [one for one in door.list_jobs() if one.submission_id == job]
    if taken:
        raise JobError(
            f"a job {job} is on the cluster at {door.address} already, it is {taken[0].status.value.lower()}; name "
            "this one by another JOB=, or leave JOB out"
        )
    return job


def _send(
    door: Door, job: str, work: Work, package: Package, ground: Ground, settings: str, *, with_key: bool
) -> None:  # fmt: skip
    """Uploads the package and submits the job. From here on the cluster has it."""
    command = shlex.join([ground.python, "-m", "launch.cli", *work.command])
    variables = {
        "GPIPE_STORAGE": ground.storage, JOB: job, FOLLOWED: "1", "COLUMNS": "120",
        "RAY_JOB_STOP_WAIT_TIME_S": str(interrupts.JOB_STOP_S),
        **({COPIES: ground.url} if ground.url else {}),
        **({SHARED_CACHE: ground.cache} if ground.cache else {}),
        **{name: value for name in PASSED_ON if (value := os.environ.get(name))},
    }  # fmt: skip
    left = secrets.leave(door) if with_key else secrets.mode_alone()
    listed = f"make jobs ADDRESS={door.address} says whether job {job} was submitted"
    try:
        with interrupts.advised(lambda: listed):
            door.submit_job(
                entrypoint=f"exec {command}",
                submission_id=job,
                runtime_env={
                    "working_dir": str(package.archive),
                    "env_vars": variables | left,
                    **ground.install,
                },
                metadata={
                    OURS: " ".join(work.command[:2]),
                    "storage": ground.storage,
                    "beside": " ".join(work.beside),
                    "set": settings,
                    "commit": package.commit,
                },
            )
    except BaseException:
        secrets.take_back(door, left)
        raise
