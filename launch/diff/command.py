"""Compares two runs, or one experiment with two settings, and prints where they first part."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from rich.console import Console

from experiments.base.hints import option
from experiments.registry import find, read_experiment_file, resolve
from experiments.scaling.scale_choice import RequestedScale
from launch.backends.select import select_backend
from launch.diff.compare import Comparison, compare
from launch.diff.plain_training import train_plainly
from launch.runs.store import RunFolder, find_run, new_run
from launch.train.command import prepare, run_experiment
from launch.worker.precision import with_available_precision
from suite.errors import SettingError
from suite.training.fingerprints import RunFingerprints

FIXED = "train.validate_every=none tracking.wandb=disabled train.threads=1"
"""Settings of both runs. Products of matrices have other bits with another number of threads."""


PLAIN = "plain"
"""In place of settings: PyTorch without a pipeline."""


def diff_runs(names: Sequence[str], console: Console) -> Comparison:
    """Compares two runs that recorded fingerprints. Raises SettingError where one has none, they do not match, or there
    are not two."""
    if len(names) != 2:
        raise SettingError(f"{len(names)} runs are given; give two")
    runs = [find_run(name) for name in names]
    a, b = (_fingerprints_of(run) for run in runs)
    precisions = {read_experiment_file(run.experiment).optimizer.precision for run in runs}
    for name, run in zip("ab", runs, strict=True):
        console.print(f"{name}: {run.path}")
    found = compare(a, b, "bf16" if "bf16" in precisions else "fp32")
    for line in found.lines():
        console.print(line)
    return found


def diff_settings(
    name: str, a: str, b: str, common: str, steps: int, scale: RequestedScale, launcher: str, console: Console
) -> Comparison:
    """Trains an experiment for a few steps with the settings ``a``, then with ``b``, and compares the two runs;
    ``plain`` is plain PyTorch, without a pipeline. Raises a SuiteError for any error that the user can fix."""
    find(name)
    cluster, quiet = select_backend(launcher).cluster(), Console(quiet=True)
    if PLAIN in (a, b) and (a == b or cluster.kind == "gpu"):
        raise SettingError("plain PyTorch runs on CPUs, and is one of the two; compare it with a pipeline on CPUs")
    runs: list[RunFolder] = []
    for which, own, other in (("a", a, b), ("b", b, a)):
        console.print(f"{which}: training {steps} steps of {name} with {own or 'its own settings'}")
        pipeline = other if own == PLAIN else own
        settings = f"{FIXED} {common} {pipeline} train.steps={steps} train.fingerprint_steps={steps}"
        chosen, scale_note = resolve(name, scale, cluster, settings)
        if scale_note and which == "a":  # b's is the same, or its settings say how it differs
            console.print(scale_note)
        make_run = partial(_new_run_in, runs, chosen.name)
        if own == PLAIN:
            train_plainly(prepare(with_available_precision(chosen, cluster, quiet.print), quiet), make_run())
        else:
            run_experiment(chosen, make_run, launcher, quiet)
    return diff_runs([str(run.path) for run in runs], console)


def _new_run_in(runs: list[RunFolder], name: str) -> RunFolder:
    runs.append(new_run(name))
    return runs[-1]


def _fingerprints_of(run: RunFolder) -> RunFingerprints:
    recorded = RunFingerprints.read(run.fingerprints)
    if not recorded.tensors:
        raise SettingError(
            f"{run.path} has no fingerprints; train it with {option('SET', 'train.fingerprint_steps=2')}"
        )
    return recorded
