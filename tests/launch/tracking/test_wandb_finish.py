"""Results added to a wandb run by another process, whose failure never fails or blocks the command."""

import psutil
import pytest

from experiments.registry import find
from launch.runs.store import RunFolder
from launch.tracking import wandb_finish
from suite.training.wandb_run import Identity
from tests.launch.tracking.wandb_parts import parts


@pytest.fixture
def run(tmp_path):
    """A run that has ended."""
    one = RunFolder(tmp_path / "t12_400m" / "1")
    one.path.mkdir(parents=True)
    one.experiment.write_text(find("t12_400m").with_settings("tracking.wandb=offline").to_toml())
    one.record.write_text('{"steps": 3}')
    one.plan_text.write_text("the plan\n")
    return one


def named(run):
    Identity("p", "n", "twelve", ("laptop",), "abcd").write(run.path)


def test_a_run_without_a_plot_still_has_its_plan(run):
    named(run)
    wandb_finish.publish(run, "end", pytest.fail)
    (part,) = parts(run.path)
    assert (part.run["run_id"], part.run["run_group"]) == ("abcd", "twelve")
    assert part.history == []
    assert part.artifacts == {"plan-abcd": {"plan.txt", "experiment.toml"}}
    (staged, *_) = (run.path / "wandb" / "data").rglob("tmp*")  # not in the home directory
    assert staged.is_file()


def test_a_run_without_wandb_is_left_alone(run):
    wandb_finish.publish(run, "end", pytest.fail)
    named(run)
    run.experiment.write_text(find("t12_400m").with_settings("tracking.wandb=disabled").to_toml())
    wandb_finish.publish(run, "end", pytest.fail)
    assert not (run.path / "wandb").exists()


def test_a_failure_is_one_sentence(run, monkeypatch):
    named(run)
    said = []
    wandb_finish.publish(run, "scores", said.append)
    (sentence,) = said
    assert sentence.startswith("wandb failed (")
    assert "scores.json" in sentence
    monkeypatch.setattr(wandb_finish, "LIMIT_S", 0.01)
    wandb_finish.publish(run, "end", said.append)
    assert said[1] == f"wandb failed (it did not finish within 0.01 s); the data that it did not get is in {run.path}"
    (run.path / "wandb" / "parts.log").unlink()
    (run.path / "wandb" / "parts.log").mkdir()
    wandb_finish.publish(run, "end", said.append)
    assert "Is a directory" in said[2]


def test_a_program_that_takes_too_long_is_killed_with_its_children(run):
    assert wandb_finish.run_logged(["bash", "-c", "sleep 600 & echo $!; wait"], run, 0.5) is None
    (below,) = run.wandb_log.read_text().split()
    _, alive = psutil.wait_procs([one for one in psutil.process_iter() if one.pid == int(below)], 20)
    assert not alive
