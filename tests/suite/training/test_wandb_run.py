"""A run's wandb run, with the real package offline: one id whatever befalls the run, never in training's way."""

import time

import pytest

from suite.settings import TrackingSettings
from suite.training.wandb_run import Identity, Wandb, has_key, wandb_mode
from tests.launch.tracking.wandb_parts import parts

NAMED = Identity("p", "n", "depth_width-laptop", ("laptop", "K=2"))
OFFLINE = TrackingSettings(wandb="offline")


@pytest.fixture(autouse=True)
def nobody(monkeypatch, tmp_path):
    """No key of this machine's."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL", "NETRC"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("setting", "environment", "mode"),
    [
        ("disabled", {"WANDB_MODE": "online"}, "disabled"),
        ("auto", {"WANDB_MODE": "offline", "WANDB_API_KEY": "x"}, "offline"),
        ("auto", {"WANDB_API_KEY": "x"}, "online"),
        ("auto", {}, "offline"),
    ],
)
def test_wandb_goes_online_only_with_a_key_or_when_told(monkeypatch, setting, environment, mode):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert wandb_mode(TrackingSettings(wandb=setting)) == mode


def test_a_key_is_one_servers(monkeypatch, tmp_path):
    (tmp_path / ".netrc").write_text(f"machine wandb.example.org login user password {40 * '0'}\n")
    assert wandb_mode(TrackingSettings()) == "offline"
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert wandb_mode(TrackingSettings()) == "online"
    assert not has_key("https://api.wandb.ai")
    (tmp_path / ".netrc").write_text("machine wandb.example.org what is this")
    assert wandb_mode(TrackingSettings()) == "offline"


@pytest.mark.slow
def test_a_run_that_is_opened_again_is_the_same_run(tmp_path):
    beside = [{"pipeline/stage.0.1/cpu_percent": 50.0}, {}, {"pipeline/stage.0.1/cpu_percent": 60.0}]
    first = Wandb(tmp_path, OFFLINE, NAMED, {"train": {"steps": 2}}, pytest.fail, lambda: beside.pop(0))
    first.log(1, {"train/loss": 2.0})
    first.log(2, {"train/loss": 1.0})
    first.finish({"valid_nll": 3.0})
    kept = Identity.read(tmp_path)
    assert kept == Identity("p", "n", "depth_width-laptop", ("laptop", "K=2"), first.run_id)
    time.sleep(1.1)  # wandb names a part by the second
    again = Wandb(tmp_path, OFFLINE, kept, {"train": {"steps": 2}}, pytest.fail)
    again.log(2, {"train/loss": 1.0})
    again.finish({})
    one, two = parts(tmp_path)
    assert one.run["run_id"] == two.run["run_id"] == first.run_id
    assert one.run["resume"]  # or an upload would replace what is there
    assert two.run["resume"]
    assert [part.run["run_group"] for part in (one, two)] == ["depth_width-laptop"] * 2
    assert (one.run["job_type"], one.run["tags"]) == ("train", ["laptop", "K=2"])
    assert one.config["train"] == {"steps": 2}
    known = ("step", "train/loss", "pipeline/stage.0.1/cpu_percent")
    assert [{name: item[name] for name in known if name in item} for item in one.history] == [
        {"step": 1, "train/loss": 2.0, "pipeline/stage.0.1/cpu_percent": 50.0},
        {"step": 2, "train/loss": 1.0},
        {"step": 2, "pipeline/stage.0.1/cpu_percent": 60.0},
    ]
    assert one.summary["valid_nll"] == 3.0


@pytest.mark.parametrize("text", ["", "[]", '{"id": "x"}', '{"project": "p", "tags": []}', "\0"])
def test_a_damaged_name_is_none(tmp_path, text):
    (tmp_path / "wandb.json").write_text(text)
    assert Identity.read(tmp_path) is None


def test_disabled_is_no_run_at_all(tmp_path):
    tracker = Wandb(tmp_path, TrackingSettings(wandb="disabled"), NAMED, {}, pytest.fail)
    tracker.log(1, {"train/loss": 1.0})
    tracker.finish({})
    assert tracker.run_id is None
    assert list(tmp_path.iterdir()) == []


def test_training_goes_on_when_wandb_does_not(tmp_path):
    said = []
    tracker = Wandb(tmp_path / "nowhere" / "\0", OFFLINE, NAMED, {}, said.append)
    tracker.log(1, {"train/loss": 1.0})
    tracker.finish({})
    assert tracker.run_id is None
    assert len(said) == 1
    assert "training continues" in said[0]
