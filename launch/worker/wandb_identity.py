"""A run's name, tags and config in wandb."""

from __future__ import annotations

import json
from typing import Any

from experiments.base.experiment import Experiment
from launch.runs.store import RunFolder
from launch.worker.run_plan import RunPlan
from suite.paths import hide_secrets
from suite.pipeline.schedule.config import ScheduleConfig
from suite.training.wandb_run import Identity

LONGEST_TAG = 64
"""Longest tag that wandb accepts."""


def wandb_identity(
    run: RunFolder, experiment: Experiment, schedule_config: ScheduleConfig, checkpoint_id: str | None
) -> Identity:
    """Returns a run's wandb identity, with the id of an earlier attempt if there was one.

    ``checkpoint_id`` is the id in the checkpoint that the run resumes from. Runs of a sweep are grouped by the sweep's
    name, which is the name of their folder.
    """
    previous, pipeline = Identity.read(run.path), experiment.pipeline
    name, family = f"{experiment.name}/{run.path.name}", run.path.parent.name
    group = None if family == experiment.name else family
    shape = f"K={pipeline.stages}", f"M={pipeline.micro_batches}", f"R={pipeline.replicas}"
    tags = experiment.scale, experiment.data, schedule_config.schedule, *shape
    run_id = previous.id if previous is not None else checkpoint_id
    return Identity(experiment.tracking.project, name, group, tuple(map(_shortened, tags)), run_id)


def _shortened(tag: str) -> str:
    """Returns a tag that wandb accepts; of a long one the end, which tells functions of one folder apart."""
    return tag if len(tag) <= LONGEST_TAG else "..." + tag[3 - LONGEST_TAG :]


def wandb_config(experiment: Experiment, plan: RunPlan) -> dict[str, Any]:
    """Returns the resolved experiment, and under ``plan`` the planner's choices: the layers of each cell, the schedule,
    the most live graphs of each cell, and the predicted seconds of a step."""
    config = plan.schedule_config
    choices = {
        "cells": list(plan.cells),
        "schedule": config.schedule,
        "virtual_stages": config.virtual_stages,
        "max_live_graphs": [min(limit, experiment.pipeline.micro_batches) for limit in config.max_live_graphs],
        "step_s": plan.step_s,
    }
    settings: dict[str, Any] = json.loads(hide_secrets(experiment.model_dump_json()))
    return settings | {"plan": choices}
