"""Steps of a run again, in its pipeline: does this machine give the same bits?

run      checkpoint of step S -> S + 1, S + 2 -> ...      metrics.jsonl: loss, norm of the gradient
again    its copy             -> S + 1, S + 2             the same, to the last bit?
"""

from __future__ import annotations

from typing import Any

from rich.console import Console

from experiments.base.experiment import Experiment
from experiments.registry import read_experiment_file
from launch.diff.short_training import with_steps
from launch.runs.checkpoints import checkpoints_to_use, note_published
from launch.runs.store import SHORT_RUNS, RunFolder, find_run, new_run, remove_run
from launch.train.command import planned_schedule, resume
from launch.worker.run_plan import RunPlan
from suite.errors import CheckpointError, SettingError
from suite.paths import write_atomically
from suite.training.checkpoint import Checkpoint, Storage
from suite.training.checkpoint.storage import MANIFEST
from suite.training.metrics import every_step

COMPARED = {"train/loss": "loss", "train/grad_norm": "gradient norm"}
"""What is compared: in each all values of the forwards, and of the backwards, have a part."""


def repeat(name: str, steps: int, console: Console) -> bool:
    """Trains up to ``steps`` steps of a run again, and prints for each whether loss and gradient norm are the same;
    returns whether all are. The newest checkpoint is taken that such steps followed. A copy of the run that differs is
    kept. Raises a SuiteError for any error that the user can fix."""
    if steps < 1:
        raise SettingError(f"--steps is {steps}; repeat at least one")
    run = find_run(name)
    before = read_experiment_file(run.experiment)
    then = {line["step"]: line for line in every_step(run.metrics)}
    checkpoints = checkpoints_to_use(run, before, "latest", console.print)
    checkpoint = next((each for each in checkpoints if each.step + 1 in then), None)
    if checkpoint is None:
        steps_found = ", ".join(str(each.step) for each in checkpoints)
        raise CheckpointError(f"the run has checkpoints of steps {steps_found} and recorded no step behind one of them")
    last = max(step for step in range(checkpoint.step + 1, checkpoint.step + steps + 1) if step in then)
    console.print(f"steps {checkpoint.step + 1} to {last} of {run.path} again, from {checkpoint}")
    again = new_run(before.name, SHORT_RUNS)
    try:
        _copy(again, before, checkpoint, last, RunPlan.read(run.plan_json))
        resume(str(again.path), "", "local", Console(quiet=True))
        now = {line["step"]: line for line in every_step(again.metrics)}
    except BaseException:
        remove_run(again)
        raise
    differing = 0
    for step in sorted(then.keys() & {*range(checkpoint.step + 1, last + 1)}):
        own, other = (_values(lines[step]) for lines in (then, now))
        differing += own != other
        same = "the same" if own == other else f"DIFFERS now: {other}"
        console.print(f"  step {step}: {own}; {same}")
    if differing:
        console.print("another number of threads, another processor or other versions can explain this; if all are the")
        console.print(f"same, the machine computes wrongly, or did so then. The copy: {again.path}")
        return False
    remove_run(again)
    return True


def _values(line: dict[str, Any]) -> str:
    """Returns what is compared of a step, to the last digit; what is not finite is recorded as null."""
    values = {what: line[key] for key, what in COMPARED.items()}
    return ", ".join(f"{what} {'not finite' if value is None else repr(value)}" for what, value in values.items())


def _copy(again: RunFolder, before: Experiment, checkpoint: Checkpoint, steps: int, plan: RunPlan) -> None:
    """Makes a new run one that has the checkpoint, and ends after ``steps`` steps."""
    source, target = checkpoint.storage, Storage(again.checkpoints)
    for name in sorted(source.names(checkpoint.folder), key=lambda name: name == MANIFEST):
        path = f"{checkpoint.folder}/{name}"
        target.write(path, source.read(path, source.size(path)))
    note_published(again, checkpoint.step)
    short = with_steps(_as_planned(before, plan), steps, fingerprint_steps=0, checkpoint_dir=None)
    write_atomically(again.experiment, short.to_toml())


def _as_planned(experiment: Experiment, plan: RunPlan) -> Experiment:
    """Returns an experiment whose next plan has the same schedule and cells: with replicas, the rounding of the norm
    depends on which layers share a stage."""
    return experiment.with_section("pipeline", **planned_schedule(plan) | {"layers_per_cell": plan.cells})
