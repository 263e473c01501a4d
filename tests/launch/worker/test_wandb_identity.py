"""A run's name, group and config in wandb."""

from experiments.registry import find
from launch.runs.store import RunFolder
from launch.worker.run_plan import RunPlan
from launch.worker.wandb_identity import wandb_config, wandb_identity
from suite.pipeline.schedule.config import ScheduleConfig
from suite.training.wandb_run import Identity

CHOSEN = find("t12_400m")


def test_a_member_of_a_sweep_is_grouped_by_it(tmp_path):
    runs = {name: RunFolder(tmp_path / name / "t12-0") for name in ("depth_width-laptop", CHOSEN.name)}
    member, alone = (wandb_identity(run, CHOSEN, ScheduleConfig(), None) for run in runs.values())
    assert (member.group, alone.group) == ("depth_width-laptop", None)
    assert member.name == alone.name == "t12_400m/t12-0"


def test_a_run_keeps_its_id_before_any_checkpoint_and_with_another_plan(tmp_path):
    run = RunFolder(tmp_path / "t12_400m" / "1")
    run.path.mkdir(parents=True)
    first = wandb_identity(run, CHOSEN, ScheduleConfig(), None)
    assert first.id is None
    Identity(first.project, first.name, None, first.tags, "abcd").write(run.path)
    other = CHOSEN.with_settings("pipeline.stages=2")
    again = wandb_identity(run, other, ScheduleConfig("1f1b"), "of a checkpoint")
    assert again.id == "abcd"
    assert set(again.tags) >= {"1f1b", "K=2"}
    moved = wandb_identity(RunFolder(tmp_path / "t12_400m" / "2"), other, ScheduleConfig("1f1b"), "of a checkpoint")
    assert moved.id == "of a checkpoint"


def test_the_planners_choices_are_in_the_config():
    config = wandb_config(CHOSEN, RunPlan((5, 4), ScheduleConfig("interleaved", (2**30, 1), 2), 0.25))
    most = CHOSEN.pipeline.micro_batches
    assert config.pop("plan") == {
        "cells": [5, 4], "schedule": "interleaved", "max_live_graphs": [most, 1], "virtual_stages": 2, "step_s": 0.25,
    }  # fmt: skip
    assert config == CHOSEN.model_dump(mode="json")


def test_of_a_tag_that_is_too_long_for_wandb_the_end_stays(tmp_path):
    source = f"/home/{'folder/' * 20}my_run.py:digits"
    own = CHOSEN.with_data(source)
    tag = wandb_identity(RunFolder(tmp_path / "digits" / "1"), own, ScheduleConfig(), None).tags[1]
    assert len(tag) == 64
    assert tag.startswith("...")
    assert tag.endswith("/my_run.py:digits")
