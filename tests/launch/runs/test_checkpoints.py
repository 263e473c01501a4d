"""``gpipe checkpoints``: every checkpoint of a run with its faults; exit code 1 if none is valid."""

import time

import pytest
import torch
from rich.console import Console
from safetensors.torch import save

from experiments.registry import find
from launch import cli
from launch.runs import store as runs
from launch.runs.checkpoints import (
    check_unused,
    checkpoint_location,
    checkpoint_location_of_run,
    checkpoints_to_use,
    kind_of_checkpoint,
)
from suite.errors import CheckpointError, SettingError
from suite.training.checkpoint import Storage, abandon_later, parse_choice
from suite.training.checkpoint.manifest import File, Manifest, digest, layer_file
from tests.launch.command_line import call
from tests.suite.training.checkpoint.saves import layer_path


@pytest.fixture
def run(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    made = runs.new_run("t12_400m")
    made.experiment.write_text(find("t12_400m").to_toml())
    return made


def write(place, step, notes=None):
    """Writes a checkpoint of two layers, as a run does."""
    storage, files = Storage(place), {}
    for layer in range(2):
        data = save({"value/weight": torch.full((3,), float(step))})
        files[layer_file(layer, "save")] = File(bytes=len(data), sha256=digest(data))
        storage.write(f"{step:08d}/{layer_file(layer, 'save')}", data)
    manifest = Manifest(step=step, written=time.time() - 600, files=files, notes=notes or {})
    storage.write(f"{step:08d}/manifest.json", manifest.encode())


def listed(run, monkeypatch):
    """Returns (exit code, rows by step) of the command."""
    monkeypatch.setattr(cli, "console", Console(width=250, markup=False, highlight=False, soft_wrap=True))
    code, out, _ = call("checkpoints", str(run.path))
    lines = [line.split("│")[1:-1] for line in out.splitlines() if line.startswith("│")]
    return code, [[cell.strip() for cell in line] for line in lines]


def test_checkpoints_are_listed_with_what_is_wrong(run, monkeypatch):
    for step in (10, 20, 30):
        write(run.checkpoints, step)
    (run.checkpoints / "00000010/good").touch()
    layer_path(run.checkpoints / "00000030", 1).write_bytes(b"")
    (run.checkpoints / "00000040").mkdir()
    (run.checkpoints / "00000050").mkdir()
    (run.checkpoints / "00000050/begun-0").touch()
    (run.checkpoints / "00000060").write_text("")
    code, rows = listed(run, monkeypatch)
    assert code == 0
    assert [row[0] for row in rows] == ["60", "50", "40", "30", "20", "10"]
    assert [row[6] for row in rows[:3]] == [
        "it is not a folder", "no manifest, it was never finished", "its manifest.json is missing",
    ]  # fmt: skip
    rows = rows[2:]
    assert [row[4] for row in rows] == ["not yet", "not yet", "not yet", "yes"]
    assert [row[3] for row in rows[1:]] == ["10", "10", "10"]
    assert "00000030/layer-0001.save.safetensors: it has 0 bytes, the manifest says" in rows[1][6]
    assert [row[6] for row in rows[2:]] == ["valid", "valid"]
    assert {row[5] for row in rows} == {""}


def test_the_best_checkpoint_is_marked_with_its_figure(run, monkeypatch):
    for step, best in ((10, 4.5), (20, 4.25), (30, 4.25)):
        write(run.checkpoints, step, {"validation": {"best": best, "best_step": min(step, 20), "unimproved": 0}})
    for step in (10, 20):  # 10 was the best until 20
        (run.checkpoints / f"{step:08d}/best").touch()
    _, rows = listed(run, monkeypatch)
    assert [(row[0], row[5]) for row in rows] == [("30", ""), ("20", "nll 4.2500"), ("10", "")]
    experiment = find("t12_400m")

    def used(choice):
        return [each.step for each in checkpoints_to_use(run, experiment, parse_choice(choice), print)]

    assert used("") == [20, 30, 10]  # should the best be damaged, the latest
    assert used("latest") == [30, 20, 10]
    assert (used("best"), used("10")) == ([20], [10])
    assert [kind_of_checkpoint(run, experiment, step) for step in (10, 20, 30)] == ["other", "best", "latest"]
    with pytest.raises(
        CheckpointError, match=r"no checkpoint of step 15; it has those of steps 30, 20 \(the best\), 10;"
    ):
        used("15")
    with pytest.raises(SettingError, match="unknown checkpoint 'newest'; choose best, latest or the number of a step"):
        used("newest")


def test_without_validation_there_is_no_best_checkpoint(run):
    write(run.checkpoints, 10)
    with pytest.raises(CheckpointError, match=r"has no best checkpoint, because no validation .* of steps 10; choose"):
        checkpoints_to_use(run, find("t12_400m"), "best", print)


def test_a_run_that_went_back_to_a_checkpoint_that_is_damaged_now_has_none_to_use(run):
    for step in (10, 20):
        write(run.checkpoints, step)
    abandon_later(Storage(run.checkpoints), 10)
    (run.checkpoints / "00000010/manifest.json").write_text("torn")
    with pytest.raises(CheckpointError, match="gone or damaged, and abandoned that of step 20; choose this"):
        checkpoints_to_use(run, find("t12_400m"), None, print)
    assert [each.step for each in checkpoints_to_use(run, find("t12_400m"), 20, print)] == [20]


def test_no_valid_checkpoint_is_exit_code_1(run, monkeypatch):
    assert listed(run, monkeypatch) == (1, [])
    write(run.checkpoints, 10)
    layer_path(run.checkpoints / "00000010", 0).unlink()
    code, rows = listed(run, monkeypatch)
    assert code == 1
    assert "layer-0000.save.safetensors: missing" in rows[0][6]


def test_another_checkpoint_location_has_subfolders_by_name_and_id(run, tmp_path, monkeypatch):
    experiment = find("t12_400m").with_settings(f"train.checkpoint_dir={tmp_path}/elsewhere/")
    run.experiment.write_text(experiment.to_toml())
    place = f"{tmp_path}/elsewhere/t12_400m/{run.path.name}"
    assert checkpoint_location(run, experiment) == checkpoint_location_of_run(run.path) == place
    write(place, 10)
    assert listed(run, monkeypatch)[0] == 0


def test_a_new_run_does_not_start_where_checkpoints_exist(tmp_path):
    place = tmp_path / "store"
    check_unused(str(place))
    write(place, 10)
    with pytest.raises(CheckpointError, match=f"a new run would write its checkpoints to {place}, which has 00000010"):
        check_unused(str(place))
