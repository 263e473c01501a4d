"""What a run is called in wandb, and what it is compared by there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from experiments.experiment import Experiment
from launch.runs import RunFolder
from suite.pipeline.recipe import Recipe
from suite.training.wandb_run import Identity

LONGEST_TAG = 64
"""wandb refuses longer ones."""


def identity_of(run: RunFolder, experiment: Experiment, recipe: Recipe, noted: str | None) -> Identity:
    """Returns what a run is called: the name and id it has if it was ever opened, also before its first checkpoint.

    ``noted`` is the id in the checkpoint that it goes on from. A member of a sweep lies in the sweep's folder, and is
    grouped by its name.
    """
    before, pipeline = Identity.of(run.path), experiment.pipeline
    name, family = f"{experiment.name}/{run.path.name}", run.path.parent.name
    tags = (
        experiment.scale, experiment.data, recipe.schedule, f"K={pipeline.stages}", f"M={pipeline.micro_batches}",
        f"R={pipeline.replicas}",
    )  # fmt: skip
    return Identity(
        experiment.tracking.project, name, None if family == experiment.name else family,
        tuple(tag[:LONGEST_TAG] for tag in tags), before.id if before is not None else noted,
    )  # fmt: skip


def config_of(experiment: Experiment, cells: Sequence[int], recipe: Recipe, step_s: float) -> dict[str, Any]:
    """Returns the resolved experiment, and under ``plan`` what was left to the plan: the layers of each cell, the
    schedule, how many graphs a cell may hold at once, and the seconds it expects a step to take."""
    graphs = [min(graphs, experiment.pipeline.micro_batches) for graphs in recipe.graphs]
    plan = asdict(recipe) | {"cells": list(cells), "graphs": graphs, "step_s": step_s}
    return experiment.model_dump(mode="json") | {"plan": plan}
