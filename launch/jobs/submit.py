"""``make submit``: runs an experiment or a sweep, or resumes a run, as a job on a Ray cluster.

name, settings -> package -> address, token, version -> job name -> probe ----> upload, submit, follow
-------------- checked before anything is uploaded; each failure is one sentence -----------
"""

from __future__ import annotations

import os
import re
import shlex
import tempfile
import time
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

from rich.console import Console

from experiments.base import hints
from experiments.base.cluster import Cluster
from experiments.custom.loading import absolute, is_source
from experiments.custom.own_imports import ROOT
from experiments.planning.pipeline_settings import split_pipeline_auto
from experiments.registry import experiments, find, resolve
from experiments.scaling.scale_choice import RequestedScale
from experiments.sweeps.members.base import folder_name
from experiments.sweeps.registry import SWEEPS, find_scale
from launch import interrupts
from launch.jobs.client import METADATA_KEY, JobClient, JobError
from launch.jobs.logs import follow_job, how_to
from launch.jobs.preflight import JobEnvironment, preflight
from launch.jobs.source_package import OWN, is_tracked, pack
from launch.runs.store import ADDRESS, COPIES, JOB, SHARED_CACHE, SOURCE
from launch.tracking.progress import FOLLOWED
from suite.errors import PlacementError, SettingError, nearest
from suite.paths import hide_secrets
from suite.pipeline.planning.devices import GIB
from suite.training.checkpoint.object_store import check_url

FORWARDED_VARIABLES = ("WANDB_MODE", "WANDB_BASE_URL", "WANDB_ENTITY")
"""Environment variables that a job inherits; no secrets."""


@dataclass(frozen=True)
class JobRequest:
    """What a user submits."""

    name: str
    """An experiment or a sweep. With ``run``: empty, or that run's ``file.py:function``, which is packed again."""
    scale: str = "auto"
    settings: str = ""
    run: str = ""
    """A run on the cluster's storage to resume."""
    storage: str = ""
    job: str = ""
    """Name of the job; empty: chosen."""


@dataclass(frozen=True)
class JobCommand:
    """What a job runs."""

    name: str
    """First part of the job's default name."""
    arguments: tuple[str, ...]
    """Of ``launch.cli``."""
    settings: str = ""
    extra_folders: tuple[str, ...] = ()
    """Folders in ``runs/`` that it writes besides its runs."""
    own: Path | None = None
    """The user's file, if git does not track it."""
    source: str = ""
    """The name that was submitted."""


def submit(request: JobRequest, address: str, console: Console) -> int:
    """Submits a job, follows it to its end and returns its exit code. Raises a SuiteError for everything that would
    make the job fail and can be checked here."""
    command = job_command(request)
    _check_names(request.job, request.storage)
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder) / "package.zip"
        commit = pack(ROOT, archive, console.print, own=command.own)
        client = JobClient(address)
        if not client.asks_for_token():
            console.print(
                f"{client.address} requires no token: anyone who can reach it can run code there and read all data"
            )
        job = _free_name(client, request.job, command)
        environment = preflight(client, request.storage, run=request.run)
        for line in environment.lines:
            console.print(line)
        _send(client, job, command, archive, commit, environment)
    console.print(f"submitted: job {job} on {client.address}; Ctrl-C leaves it running")
    console.print(how_to(client, job))
    return follow_job(client, job, console)


def submit_doctor(address: str, storage: str, console: Console) -> int:
    """Runs the doctor on a cluster's head and returns its exit code. Raises a SuiteError if it cannot be submitted; the
    doctor itself reports faults of nodes."""
    _check_names("", storage)
    command = JobCommand("doctor", ("doctor", *(("--storage", storage) if storage else ())))
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder) / "package.zip"
        commit = pack(ROOT, archive, lambda line: None)
        client = JobClient(address)
        job = _free_name(client, "", command)
        environment = preflight(client, storage, lenient=True)
        console.print(f"running the doctor on {client.address} as job {job}")
        _send(client, job, command, archive, commit, replace(environment, url=""))
    return follow_job(client, job, console)


def job_command(request: JobRequest) -> JobCommand:
    """Returns the command of a job. Raises a SuiteError for an unknown name or scale, or an invalid setting."""
    name, scale, run, settings = request.name, request.scale, request.run, request.settings
    url = request.storage.rstrip("/") if "://" in request.storage else ""
    if url and not run and name not in SWEEPS:  # a resumed run keeps its own
        settings = f"{settings} train.checkpoint_dir={url}/checkpoints".strip()
    options = ("--set", settings) if settings else ()
    if run:
        if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", run):
            raise SettingError(
                f"{hints.option('RUN', repr(run))} is not a run on a cluster's storage: give name/id or the id"
            )
        own = _packed_source(name)[1] if is_source(name) else None
        return JobCommand(run.rpartition("/")[2], ("resume", run, *options), request.settings, own=own, source=name)
    if name in SWEEPS:
        if url:
            raise SettingError(
                f"the runs of a sweep read each other's folders: set {hints.option('STORAGE')} to a folder, not to "
                + url
            )
        if settings:
            raise SettingError(f"sweep {name} takes no settings, because its members have their own; leave SET out")
        folder = folder_name(name, find_scale(SWEEPS[name], scale))
        return JobCommand(name, ("sweep", name, "--scale", scale, "--launcher", "ray"), extra_folders=(folder,))
    if not name:
        known = ", ".join([*experiments(), *SWEEPS])
        raise SettingError(
            f"which experiment or sweep? Name one with {hints.option('NAME')}, or resume a run with "
            f"{hints.command('submit', RUN='name/id')}; {known}"
        )
    if not is_source(name) and name not in experiments():
        raise SettingError(f"no experiment or sweep is called {name}; {nearest(name, [*experiments(), *SWEEPS])}")
    _check_settings(name, scale, settings)
    name, own = _packed_source(name) if is_source(name) else (name, None)
    arguments = ("experiment", name, "--scale", scale, *options)
    return JobCommand(name.rpartition(":")[2], arguments, request.settings, own=own, source=request.name)


def _packed_source(name: str) -> tuple[str, Path | None]:
    """Returns ``path.py:function`` with the path in the package, and the file if git does not track it."""
    source = absolute(name)
    place, _, function = source.rpartition(":")
    if Path(place).suffix != ".py" or is_tracked(ROOT, place):
        return source, None
    return f"{OWN}/{Path(place).name}:{function}", ROOT / place


def _check_settings(name: str, scale: str, settings: str) -> None:
    """Raises SettingError for settings that are invalid on every cluster; what fits is only known there."""
    settings, pipeline_auto = split_pipeline_auto(settings)
    if scale not in get_args(RequestedScale):
        raise SettingError(f"unknown scale {scale!r}; {nearest(scale, get_args(RequestedScale))}")
    if scale in ("paper", "auto"):  # auto may choose any scale
        with suppress(SettingError) if scale == "auto" else nullcontext():
            find(name).with_settings(settings)
            return
    with suppress(PlacementError):
        small: RequestedScale = "slice" if scale == "slice" else "laptop"
        resolve(name, small, Cluster(64, 64 * GIB, "cpu"), settings, pipeline_auto)


def _check_names(job: str, storage: str) -> None:
    check_url(storage)
    if job and not re.fullmatch(r"[A-Za-z0-9][\w.-]{0,99}", job):
        raise SettingError(
            f"{hints.option('JOB', repr(job))} is not a job name: use letters and digits, and . _ - after the first "
            "character"
        )
    if storage and not re.match("/|[a-z0-9]+://", storage):
        raise SettingError(
            f"{hints.option('STORAGE', repr(storage))} cannot be shared by nodes: give an absolute path or a URL"
        )


def _free_name(client: JobClient, requested: str, command: JobCommand) -> str:
    """Returns the job's name: the requested one, or the command's and the time. Raises JobError if the cluster already
    has a job with it."""
    job = requested or f"{command.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    taken = [details for details in client.list_jobs() if details.submission_id == job]
    if taken:
        raise JobError(
            f"the cluster at {client.address} already has a job {job} ({taken[0].status.value.lower()}); choose "
            f"another name with {hints.option('JOB', '...')}"
        )
    return job


def _send(
    client: JobClient, job: str, command: JobCommand, archive: Path, commit: str, environment: JobEnvironment
) -> None:
    entrypoint = shlex.join([environment.python, "-m", "launch.cli", *command.arguments])
    variables = {
        "GPIPE_STORAGE": environment.storage,
        JOB: job,
        FOLLOWED: "1",
        "COLUMNS": "120",
        "RAY_JOB_STOP_WAIT_TIME_S": str(interrupts.JOB_STOP_S),
        **({COPIES: environment.url} if environment.url else {}),
        ADDRESS: client.address,
        **({SOURCE: str(command.own) + command.source[command.source.rindex(":") :]} if command.own else {}),
        **({SHARED_CACHE: environment.cache} if environment.cache else {}),
        **{name: value for name in FORWARDED_VARIABLES if (value := os.environ.get(name))},
    }
    advice = f"{hints.command('jobs', ADDRESS=client.address)} shows whether job {job} was submitted"
    with interrupts.interrupt_message(lambda: advice):
        client.submit_job(
            entrypoint=f"exec {entrypoint}",
            submission_id=job,
            runtime_env={"working_dir": str(archive), "env_vars": variables, **environment.install},
            metadata={
                METADATA_KEY: " ".join(command.arguments[:2]),
                "storage": environment.storage,
                "extra_folders": " ".join(command.extra_folders),
                "set": hide_secrets(command.settings),
                "commit": commit,
            },
        )
