"""Compares two runs, or one experiment with two settings, and prints where they first part."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from experiments.base.hints import option
from experiments.registry import find, read_experiment_file
from launch.diff.compare import Comparison, compare
from launch.diff.short_training import ShortTraining
from launch.runs.store import RunFolder, find_run
from suite.errors import SettingError
from suite.training.fingerprints import RunFingerprints

PLAIN = "plain"
"""In place of settings: PyTorch without a pipeline."""


def diff_runs(names: Sequence[str], console: Console) -> Comparison:
    """Compares two runs that recorded fingerprints. Raises SettingError where one has none or they do not match."""
    runs = [find_run(name) for name in names]
    experiments = [read_experiment_file(run.experiment) for run in runs]
    for which, run, experiment in zip("ab", runs, experiments, strict=True):
        own = experiment.pipeline
        shape = f"K = {own.stages}, M = {own.micro_batches}, {own.schedule}" if run.plan_json.exists() else PLAIN
        console.print(f"{which}: {run.path}, {shape}")
    precisions = {experiment.optimizer.precision for experiment in experiments}
    a, b = map(fingerprints_of, runs)
    found = compare(a, b, "bf16" if "bf16" in precisions else "fp32")
    for line in found.lines():
        console.print(line)
    return found


def diff_settings(training: ShortTraining, a: str, b: str, console: Console) -> Comparison:
    """Trains the steps with the settings ``a``, then with ``b``, and compares the two runs; ``plain`` is plain PyTorch,
    without a pipeline. Raises a SuiteError for any error that the user can fix."""
    find(training.name)
    if a == b == PLAIN:
        raise SettingError("both are plain PyTorch; give one of them the settings of a pipeline")
    runs: list[RunFolder] = []
    for which, own, other in (("a", a, b), ("b", b, a)):
        console.print(f"{which}: training {training.steps} steps of {training.name} with {own or 'its own settings'}")
        chosen, note = training.resolved(other if own == PLAIN else own)
        if note and which == "a":  # b's is the same, or its settings say how it differs
            console.print(note)
        runs.append(training.train_plainly(chosen) if own == PLAIN else training.train(chosen))
    return diff_runs([str(run.path) for run in runs], console)


def fingerprints_of(run: RunFolder) -> RunFingerprints:
    """Returns what a run recorded. Raises SettingError where it has no fingerprints, or those of another version."""
    recorded = RunFingerprints.read(run.fingerprints)
    if not recorded.tensors:
        raise SettingError(
            f"{run.path} has no fingerprints; train it with {option('SET', 'train.fingerprint_steps=2')}"
        )
    return recorded
