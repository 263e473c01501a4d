"""Records: JSON lines, and wandb with the real package offline."""

import json

import pytest

from suite.settings import TrackingSettings
from suite.training.lines import read_lines
from suite.training.trackers import JsonLines, Wandb, wandb_mode


def test_a_line_a_step_at_once_on_disk_and_null_for_what_is_not_finite(tmp_path):
    tracker = JsonLines(tmp_path / "metrics.jsonl", 0)
    tracker.log(1, {"loss": 2.5})
    tracker.log(2, {"loss": float("nan")})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "loss": 2.5}\n{"step": 2, "loss": null}\n'
    tracker.finish({})


def test_a_resumed_run_drops_what_came_after_its_checkpoint_and_a_torn_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": s, "loss": s}) + "\n" for s in range(1, 6)) + '{"step": 6, "lo')
    tracker = JsonLines(path, 3)
    tracker.log(4, {"loss": 40.0})
    tracker.finish({})
    assert [line["loss"] for line in read_lines(path)] == [1, 2, 3, 40.0]


@pytest.mark.parametrize(
    ("setting", "environment", "mode"),
    [
        ("disabled", {"WANDB_MODE": "online"}, "disabled"),
        ("auto", {"WANDB_MODE": "offline", "WANDB_API_KEY": "x"}, "offline"),
        ("auto", {"WANDB_API_KEY": "x"}, "online"),
        ("auto", {}, "offline"),
    ],
)
def test_wandb_goes_online_only_with_a_key_or_when_told(monkeypatch, tmp_path, setting, environment, mode):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert wandb_mode(TrackingSettings(wandb=setting)) == mode


def test_disabled_is_no_run_at_all(tmp_path):
    tracker = Wandb(tmp_path, TrackingSettings(wandb="disabled"), "n", {}, None, pytest.fail)
    tracker.log(1, {"loss": 1.0})
    tracker.finish({})
    assert tracker.run_id is None
    assert list(tmp_path.iterdir()) == []


def test_training_goes_on_when_wandb_does_not(tmp_path):
    said = []
    tracker = Wandb(tmp_path / "nowhere" / "\0", TrackingSettings(wandb="offline"), "n", {}, None, said.append)
    tracker.log(1, {"loss": 1.0})
    tracker.finish({})
    assert tracker.run_id is None
    assert len(said) == 1
    assert "training goes on" in said[0]
