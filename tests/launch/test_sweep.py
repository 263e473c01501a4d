"""A sweep as a person makes it, at the scale that is made for this: trained, scored and reported in processes of its
own, with one member that cannot be run."""

from __future__ import annotations

import json

import pytest
from rich.console import Console

from experiments.cluster import GIB, Cluster
from experiments.sweeps import SWEEPS
from launch.sweeps.left import what_is_left
from launch.sweeps.sweep import sweep
from suite.errors import PlacementError, SettingError
from tests.launch.test_end_to_end import gpipe


def test_a_sweep_reports_the_rest_where_a_member_fails_and_then_runs_what_is_left(tmp_path):
    broken = tmp_path / "runs/bilingual-tiny/es-0"
    broken.parent.mkdir(parents=True)
    broken.write_text("where the folder of a run should be")
    said = gpipe(tmp_path, "sweep", "bilingual", "--scale", "tiny", code=1)
    assert "train bilingual-tiny/es-0 failed: " in said
    assert "Traceback" not in said
    assert "report: runs/bilingual-tiny/report.html" in said
    for folder in ("depth_width-tiny/t12_400m-0", "bilingual-tiny/de-0"):
        scores = json.loads((tmp_path / "runs" / folder / "scores.json").read_text())
        assert (scores["step"], scores["beam"], scores["max_pairs"]) == (4, 1, 3)
    page = (tmp_path / "runs/bilingual-tiny/report.md").read_text()
    assert "left out of all numbers: bilingual-tiny/es-0." in page
    assert "| bilingual-tiny/de-0 |" in page

    broken.unlink()
    said = gpipe(tmp_path, "sweep", "bilingual", "--scale", "tiny")
    assert "2 of 3 members are finished already" in said
    assert "train bilingual-tiny/de-0" not in said
    assert "left out" not in (tmp_path / "runs/bilingual-tiny/report.md").read_text()


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
