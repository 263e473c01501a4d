"""``make submit``: runs an experiment or a sweep, or resumes a run, as a job on a Ray cluster.

name, settings -> copy of the checkout -> address, token, Ray's version -> upload, submit ----> follow
-------------- checked here; each failure is one sentence -------------   start.py checks the nodes there
"""

from __future__ import annotations

import os
import re
import shlex
import tempfile
import time
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from rich.console import Console

from experiments.base import hints
from experiments.base.cluster import Cluster
from experiments.custom.loading import absolute
from experiments.custom.own_imports import ROOT
from experiments.names import SWEEP_NAMES, TRANSFORMER, Scale, check_experiment, experiment_names, is_source
from experiments.planning.pipeline_settings import split_pipeline_auto
from experiments.registry import find, resolve
from experiments.sweeps.registry import SWEEPS, find_scale
from launch import interrupts
from launch.jobs.client import JobClient, JobError
from launch.jobs.follow import JobLog
from launch.jobs.package import OWN, copy_checkout, is_tracked
from launch.runs.store import ADDRESS, SOURCE
from suite.errors import PlacementError, SettingError, check_known
from suite.paths import hide_secrets
from suite.pipeline.planning.devices import GIB

FORWARDED_VARIABLES = ("WANDB_MODE", "WANDB_BASE_URL", "WANDB_ENTITY")
"""Environment variables that a job inherits; no secrets."""

PYTHON = (
    r"""P=$(sed -n 's|.* \(/.*\)/lib/python3[^/]*/site-packages/ray/_raylet.so$|\1/bin/python|p' /proc/$PPID/maps """
    r"""2>/dev/null | head -n 1); [ -x "$P" ] || P=python3; exec "$P" """
)
"""Shell code that runs the Python of Ray's own workers, which need not be the first in PATH. The shell's parent is one
of these workers, and has loaded Ray's library from the same environment."""


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
    """A folder that all nodes share; empty: GPIPE_STORAGE of the node where the job starts."""
    job: str = ""
    """Name of the job; empty: chosen."""


@dataclass(frozen=True)
class JobCommand:
    """What a job runs."""

    name: str
    """First part of the job's default name."""
    arguments: tuple[str, ...]
    """Of ``launch.cli``."""
    own: Path | None = None
    """The user's file, if git does not track it."""
    source: str = ""
    """``file.py:function`` of that file as this machine finds it: it has to be packed again to resume."""


def submit(request: JobRequest, address: str, console: Console) -> int:
    """Submits a job, follows it to its end and returns its exit code. Raises a SuiteError for what would make the job
    fail and can be checked here."""
    _check_names(request.job, request.storage)
    command = job_command(request)
    return _run(command, address, request.storage, console, request.job, hide_secrets(request.settings))


def submit_doctor(address: str, storage: str, console: Console) -> int:
    """Runs the doctor on a cluster's head and returns its exit code. Raises a SuiteError if it cannot be submitted; the
    doctor itself reports faults of nodes."""
    _check_names("", storage)
    command = JobCommand("doctor", ("doctor", *(("--storage", storage) if storage else ())))
    return _run(command, address, storage, console)


def _run(command: JobCommand, address: str, storage: str, console: Console, job: str = "", settings: str = "") -> int:
    """Packs the checkout, submits the command and follows it; returns its exit code."""
    job = job or f"{command.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    with tempfile.TemporaryDirectory() as folder:
        commit = copy_checkout(ROOT, Path(folder), console.print, command.own)
        client = JobClient(address)
        if any(details.submission_id == job for details in client.list_jobs()):
            other = hints.option("JOB", "...")
            raise JobError(f"the cluster at {client.address} already has a job {job}; choose another name with {other}")
        metadata = {"gpipe": " ".join(command.arguments[:2]), "set": settings, "commit": commit}
        send(client, job, command, Path(folder), storage, metadata)
    again = {"NAME": command.source, "STORAGE": storage, "ADDRESS": client.address}
    log = JobLog(client, job, {name: value for name, value in again.items() if value}, console)
    console.print(f"submitted: job {job} on {client.address}; Ctrl-C leaves it running\n{log.how_to()}", soft_wrap=True)
    return log.follow()


def job_command(request: JobRequest) -> JobCommand:
    """Returns the command of a job. Raises a SuiteError for an unknown name or scale, or an invalid setting."""
    name, scale, run, settings = request.name, request.scale, request.run, request.settings
    options = ("--set", settings) if settings else ()
    if run:
        if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", run):
            raise SettingError(
                f"{hints.option('RUN', repr(run))} is not a run on a cluster's storage: give name/id or the id"
            )
        _, own, source = _packed(name)
        return JobCommand(run.rpartition("/")[2], ("resume", run, *options), own, source)
    if name in SWEEPS:
        if settings:
            raise SettingError(f"sweep {name} takes no settings, because its members have their own; leave SET out")
        find_scale(SWEEPS[name], scale)
        return JobCommand(name, ("sweep", name, "--scale", scale, "--launcher", "ray"))
    if not name:
        known = ", ".join([*experiment_names(), *SWEEP_NAMES])
        raise SettingError(
            f"which experiment or sweep? Name one with {hints.option('NAME')}, or resume a run with "
            f"{hints.command('submit', RUN='name/id')}; {known}"
        )
    check_experiment(name, (TRANSFORMER, *SWEEP_NAMES))
    _check_settings(name, scale, settings)
    packed, own, source = _packed(name)
    return JobCommand(name.rpartition(":")[2], ("experiment", packed, "--scale", scale, *options), own, source)


def _check_settings(name: str, scale: str, settings: str) -> None:
    """Raises SettingError for settings that are invalid on every cluster; what fits is only known there."""
    settings, pipeline_auto = split_pipeline_auto(settings)
    check_known("scale", scale, get_args(Scale))
    if scale in ("paper", "auto"):  # auto may choose any scale
        with suppress(SettingError) if scale == "auto" else nullcontext():
            find(name).with_settings(settings)
            return
    with suppress(PlacementError):
        small: Scale = "slice" if scale == "slice" else "laptop"
        resolve(name, small, Cluster(64, 64 * GIB, "cpu"), settings, pipeline_auto)


def _packed(name: str) -> tuple[str, Path | None, str]:
    """Returns an experiment's name in the package; if it is in a file that git does not track, also the file, and
    ``file.py:function`` as this machine finds it."""
    if not is_source(name):
        return name, None, ""
    source = absolute(name)
    place, _, function = source.rpartition(":")
    if Path(place).suffix != ".py" or is_tracked(ROOT, place):
        return source, None, ""
    own = ROOT / place
    return f"{OWN}/{own.name}:{function}", own, f"{own}:{function}"


def _check_names(job: str, storage: str) -> None:
    if job and not re.fullmatch(r"[A-Za-z0-9][\w.-]{0,99}", job):
        raise SettingError(
            f"{hints.option('JOB', repr(job))} is not a job name: use letters and digits, and . _ - after the first "
            "character"
        )
    if storage and not storage.startswith("/"):
        raise SettingError(
            f"{hints.option('STORAGE', repr(hide_secrets(storage)))} is not a folder that nodes share: give an "
            "absolute path; checkpoints alone may go to a URL, by train.checkpoint_dir"
        )


def send(
    client: JobClient, job: str, command: JobCommand, package: Path, storage: str, metadata: dict[str, str]
) -> None:
    """Uploads the folder ``package`` and submits a job that runs in it."""
    variables = {
        interrupts.JOB: job,
        ADDRESS: client.address,
        "COLUMNS": "120",
        "RAY_JOB_STOP_WAIT_TIME_S": str(interrupts.JOB_STOP_S),
        **({"GPIPE_STORAGE": storage} if storage else {}),
        **({SOURCE: command.source} if command.source else {}),
        **{name: value for name in FORWARDED_VARIABLES if (value := os.environ.get(name))},
    }
    os.environ["RAY_RUNTIME_ENV_IGNORE_GITIGNORE"] = "1"  # all that is in the folder is meant to travel
    listed = f"{client.ray} job list --address {client.address}"
    with interrupts.interrupt_message(lambda: f"{listed} shows whether {job} was sent"):
        client.submit_job(
            entrypoint=f"{PYTHON}-m launch.jobs.start {shlex.join(command.arguments)}",
            submission_id=job,
            runtime_env={"working_dir": str(package), "env_vars": variables},
            metadata=metadata,
        )
