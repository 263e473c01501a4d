"""``gpipe replay`` at a size: 500 random actions of runs of several pipelines have the bits that the runs recorded."""

import random

import pytest
import torch

from launch.diff.replay import ReplayedAction, replay
from launch.terminal import Terminal
from launch.worker.run_plan import RunPlan
from tests.launch.command_line import SMALL, gpipe_here, only_run

STEPS, MICRO_BATCHES, ACTIONS = 4, 3, 100

PIPELINES = (
    ("1f1b", 2, 1, 1), ("fill_drain pipeline.remat=always", 3, 1, 1), ("1f1b", 2, 2, 1), ("interleaved", 2, 1, 2),
    ("zbv", 2, 1, 2),
)  # fmt: skip
"""Schedule, K, R, cells a stage."""


@pytest.mark.parametrize(("schedule", "stages", "replicas", "cells"), PIPELINES)
def test_random_actions_are_those_of_the_run(tmp_path, monkeypatch, capsys, schedule, stages, replicas, cells):
    given = (
        f"{SMALL.replace('train.checkpoint_every=3', 'train.checkpoint_every=1').replace('fill_drain', schedule)} "
        f"train.steps={STEPS} train.fingerprint_steps={STEPS} model.dropout=0.1 tracking.wandb=disabled "
        f"pipeline.stages={stages} pipeline.replicas={replicas} pipeline.virtual_stages={cells}"
    )
    monkeypatch.chdir(tmp_path)  # its folder of prepared data
    gpipe_here(tmp_path, "experiment", "t12_400m", "--scale", "laptop", "--launcher", "local", "--set", given)
    run, draw, threads = only_run(tmp_path), random.Random(schedule), torch.get_num_threads()
    rows = RunPlan.read(run / "plan.json").schedule_config.actions(stages, MICRO_BATCHES)
    for _ in range(ACTIONS):
        stage = draw.randrange(stages)
        action = draw.choice([action for action in rows[stage] if action.kind != "W"])
        asked = ReplayedAction(draw.choice((1, STEPS)), draw.randrange(replicas), stage, action)
        capsys.readouterr()
        assert replay(str(run), asked, None, None, Terminal()), asked
        *lines, last = capsys.readouterr().out.splitlines()[1:]
        assert lines, asked
        assert last.endswith("the same to the bit") or all("loss of parts" in line for line in lines), asked
    torch.set_num_threads(threads)
