"""The first steps of an experiment, trained to be compared: in a pipeline, or by plain PyTorch."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rich.console import Console

from experiments.base.cluster import Cluster
from experiments.base.experiment import Experiment
from experiments.names import Scale
from experiments.planning.choose import try_plan
from experiments.registry import resolve
from launch.backends.backend import Backend
from launch.diff.plain_training import check_fits, train_plainly
from launch.runs.store import SHORT_RUNS, RunFolder, new_run, remove_run
from launch.train.command import prepare, run_experiment
from launch.train.session import Session
from launch.worker.devices import this_machine
from suite.errors import PlanError, SettingError

WORKERS = 4
"""The most workers of a pipeline that ``gpipe check`` tries. They share the GPUs of a machine that has fewer."""


@dataclass(frozen=True)
class ShortTraining:
    """A few steps of an experiment, whatever the pipeline."""

    name: str
    scale: Scale
    steps: int
    settings: str
    """Of all runs; those of a pipeline come on top."""

    def resolved(self, pipeline: str = "") -> tuple[Experiment, str]:
        """Returns the experiment, and what was shrunk. Raises SettingError for a wrong setting."""
        chosen, note = resolve(self.name, self.scale, shared_devices(), f"{self.settings} {pipeline}")
        return with_steps(chosen, self.steps, threads=1, fingerprint_steps=self.steps), note

    def train(self, chosen: Experiment) -> RunFolder:
        """Trains it in its pipeline. Raises a SuiteError for any error that the user can fix."""
        session = Session(_SharingBackend(), Console(quiet=True), shows_samples=False, is_brief=True)
        return run_experiment(chosen, partial(new_run, chosen.name, SHORT_RUNS), session)

    def prepared(self, chosen: Experiment, console: Console) -> Experiment:
        """Returns it with its data, for plain PyTorch. Raises DataError when none is available."""
        return prepare(chosen, _SharingBackend(), console)

    def train_plainly(self, chosen: Experiment) -> RunFolder:
        """Trains by plain PyTorch what its pipeline would train. Raises as ``train`` does, PlacementError when the
        model is too large for one process, and SettingError when its code raises; then there is no run."""
        check_fits(chosen)
        prepared = self.prepared(chosen, Console(quiet=True))
        run = new_run(prepared.name, SHORT_RUNS)
        try:
            train_plainly(prepared, run, shared_devices())
        except BaseException as error:
            remove_run(run)
            if not isinstance(error, RuntimeError):
                raise
            *_, said = str(error).strip().splitlines()  # the process's traceback
            places = re.findall(r'File "(?!.*site-packages)(.+)", line (\d+)', str(error))
            where = f" ({places[-1][0]}, line {places[-1][1]})" if places else ""
            raise SettingError(f"plain PyTorch cannot train {chosen.name}: {said}{where}") from error
        return run


def with_steps(chosen: Experiment, steps: int, **train: Any) -> Experiment:
    """Returns an experiment that trains so many steps to be compared, and does nothing else."""
    values = chosen.model_dump()
    values["train"] |= dict.fromkeys(("validate_every", "patience", "profile_steps")) | {"steps": steps} | train
    values["tracking"]["wandb"] = "disabled"
    return chosen.validated(values)


def shared_devices() -> Cluster:
    """Returns this machine's devices, and a share of its GPUs for each of ``WORKERS`` if it has fewer."""
    machine = this_machine()
    if machine.kind == "cpu" or machine.devices >= WORKERS:
        return machine  # cores are shared by any number of workers
    each = math.ceil(WORKERS / machine.devices)
    return replace(machine, devices=each * machine.devices, bytes_per_device=machine.bytes_per_device // each)


def memory_fault(work: Experiment) -> str:
    """Returns what a pipeline needs and this machine does not have; empty if memory is not what it lacks."""
    devices = shared_devices()
    fault = _fault(work, devices)
    return fault if fault and not _fault(work, replace(devices, bytes_per_device=2**62)) else ""


def _fault(work: Experiment, devices: Cluster) -> str:
    """Returns why there is no plan; empty if there is one."""
    try:
        try_plan(work, devices)
    except PlanError as fault:
        return fault.errors[0]
    return ""


class _SharingBackend(Backend):
    def cluster(self) -> Cluster:
        return shared_devices()
