"""Steps of a run again, from its checkpoint and in its pipeline: does this machine still give the same bits?

run      checkpoint of step S -> S + 1, S + 2 -> ...      metrics.jsonl: loss, norm of the gradient
again    its copy             -> S + 1, S + 2             the same, to the last bit?
"""

from __future__ import annotations

import shutil

from rich.console import Console

from experiments.base.experiment import Experiment
from experiments.registry import read_experiment_file
from launch.runs.checkpoints import checkpoints_to_use, note_published
from launch.runs.store import RunFolder, find_run, new_run
from launch.train.command import planned_schedule, resume
from suite.errors import CheckpointError, SettingError
from suite.paths import read_json, write_atomically
from suite.training.checkpoint import Checkpoint, Storage
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
    checkpoint = _followed_by_a_step(checkpoints_to_use(run, before, "latest", console.print), set(then))
    last = max(step for step in range(checkpoint.step + 1, checkpoint.step + steps + 1) if step in then)
    again = _copy(run, before, checkpoint, last)
    console.print(f"steps {checkpoint.step + 1} to {last} of {run.path} again, from {checkpoint}")
    resume(str(again.path), "", "local", Console(quiet=True))
    differing = 0
    for line in every_step(again.metrics):
        own, other = ({key: one.get(key) for key in COMPARED} for one in (then[line["step"]], line))
        differing += own != other
        values = ", ".join(f"{what} {own[key]!r}" for key, what in COMPARED.items())
        if own == other:
            console.print(f"  step {line['step']}: {values}: the same to the last bit")
        else:
            now = ", ".join(f"{what} {other[key]!r}" for key, what in COMPARED.items())
            console.print(f"  step {line['step']}: {values}; DIFFERS now: {now}")
    if differing:
        console.print(
            "other threads, another processor or other versions explain this; else the machine computes wrongly"
        )
        console.print(f"now or did so then. The copy: {again.path}")
        return False
    shutil.rmtree(again.path)
    return True


def _followed_by_a_step(checkpoints: list[Checkpoint], steps: set[int]) -> Checkpoint:
    """Returns the newest checkpoint after which the run recorded a step. Raises CheckpointError if there is none."""
    for checkpoint in checkpoints:
        if checkpoint.step + 1 in steps:
            return checkpoint
    found = ", ".join(str(checkpoint.step) for checkpoint in checkpoints)
    raise CheckpointError(f"the run has checkpoints of steps {found} and recorded no step behind one of them")


def _copy(run: RunFolder, before: Experiment, checkpoint: Checkpoint, steps: int) -> RunFolder:
    """Returns a new run with a copy of the checkpoint, that ends after ``steps`` steps."""
    again = new_run(before.name)
    source, target = checkpoint.storage, Storage(again.checkpoints)
    for name in sorted(source.names(checkpoint.folder), key=lambda name: name == "manifest.json"):
        path = f"{checkpoint.folder}/{name}"
        target.write(path, source.read(path, source.size(path)))
    note_published(again, checkpoint.step)
    plan = read_json(run.plan_record) or {}
    # with replicas, the rounding of the norm depends on which layers share a stage
    pipeline = planned_schedule(plan) | {"layers_per_cell": tuple(plan["cells"])}
    train = {"steps": steps, "checkpoint_dir": None, "validate_every": None, "fingerprint_steps": 0}
    changed = before.model_copy(
        update={
            "pipeline": before.pipeline.model_copy(update=pipeline),
            "train": before.train.model_copy(update=train),
            "tracking": before.tracking.model_copy(update={"wandb": "disabled"}),
        }
    )
    write_atomically(again.experiment, changed.to_toml())
    return again
