"""What a sweep refuses before it trains anything."""

from __future__ import annotations

import json

import pytest
from rich.console import Console

from experiments.cluster import GIB, Cluster
from experiments.sweeps import SWEEPS
from launch.sweeps.left import what_is_left
from launch.sweeps.sweep import sweep
from suite.errors import PlacementError, SettingError


def test_a_folder_that_holds_another_run_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    member = SWEEPS["bilingual"].members("tiny", Cluster(2, 2**30, "cpu"), tmp_path / "runs")[-1]
    assert not what_is_left(member).trained
    folder = tmp_path / "runs" / member.folder
    folder.mkdir(parents=True)
    (folder / "record.json").write_text(json.dumps({"steps": member.experiment.train.steps}))
    same = member.experiment.with_settings("train.threads=2 train.checkpoint_every=3")
    (folder / "experiment.toml").write_text(same.to_toml())
    left = what_is_left(member)
    assert left.trained
    assert not left.scored
    (folder / "experiment.toml").write_text(member.experiment.with_settings("train.steps=5").to_toml())
    with pytest.raises(SettingError, match=r"es-0 holds a run with other settings \(train.steps is 5 there and 4 here"):
        what_is_left(member)


def test_the_scale_for_a_gpu_is_refused_without_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("launch.site.this_machine", lambda: Cluster(2, 12 * GIB, "cpu"))
    with pytest.raises(PlacementError, match="made for a GPU, and there are 2 CPU cores"):
        sweep("depth_width", "gpu", "spawn", Console(quiet=True))
