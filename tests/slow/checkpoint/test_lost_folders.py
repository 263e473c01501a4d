"""A resume that is refused changes nothing: by another model, and by checkpoints that are not where they were."""

import shutil

import pytest

from tests.launch.command_line import gpipe, only_run

MODEL = """
import torch
from torch import nn
from suite import TrainSpec

torch.manual_seed(1)
ROWS = [(torch.randn(8), torch.tensor(at % 2)) for at in range(32)]

def run():
    layers = [nn.Linear(8, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2)]
    return TrainSpec(layers=layers, loss=nn.CrossEntropyLoss(), train=ROWS)
"""
SETTINGS = (
    "train.steps=6 train.checkpoint_every=2 train.batch_rows=4 pipeline.stages=2 pipeline.micro_batches=2 "
    "tracking.wandb=disabled"
)


def train(folder, *settings):
    write_model(folder, 16)
    gpipe(folder, "experiment", "model.py:run", "--launcher", "local", "--set", " ".join([SETTINGS, *settings]))
    return only_run(folder)


def write_model(folder, width):
    (folder / "model.py").write_text(MODEL.replace("WIDTH", str(width)))


def state_of(folder):
    """Returns the bytes of all checkpoints and of what a run that goes on continues."""
    kinds = (".safetensors", ".json", ".jsonl")
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix in kinds]
    return {str(path): path.read_bytes() for path in files if path.name != "attempts.jsonl"}


def resume(folder, run, *arguments, code):
    return gpipe(folder, "resume", str(run), "--launcher", "local", *arguments, code=code).replace("\n", " ")


def test_a_resume_from_an_earlier_step_that_is_refused_keeps_the_later_checkpoints(tmp_path):
    run = train(tmp_path)
    before = state_of(run / "checkpoints")
    assert len(list(run.glob("checkpoints/*/manifest.json"))) == 2
    write_model(tmp_path, 24)
    assert "does not match this model" in resume(tmp_path, run, "--checkpoint", "4", code=2)
    assert state_of(run / "checkpoints") == before
    assert (run / "record.json").exists()
    write_model(tmp_path, 16)
    resume(tmp_path, run, "--checkpoint", "4", code=0)
    assert len(list(run.glob("checkpoints/*/manifest.json"))) == 2
    assert not list(run.glob("checkpoints/*/abandoned"))


@pytest.mark.parametrize("lost", ["moved", "emptied", "newest"])
def test_a_run_whose_checkpoints_are_gone_does_not_start_at_step_0(tmp_path, lost):
    run = train(tmp_path, f"train.checkpoint_dir={tmp_path}/storage")
    folder = tmp_path / "storage" / run.parent.name / run.name
    shutil.copytree(folder, tmp_path / "saved")
    if lost == "newest":
        shutil.rmtree(folder / "00000006")
    else:
        shutil.rmtree(tmp_path / "storage")
    if lost == "emptied":
        (tmp_path / "storage").mkdir()
    before = state_of(run), state_of(tmp_path / "storage")
    printed = resume(tmp_path, run, "--set", "train.steps=8", code=2)
    assert f"has published a checkpoint of step 6, and {folder} has " in printed
    assert (state_of(run), state_of(tmp_path / "storage")) == before
    shutil.copytree(tmp_path / "saved", folder, dirs_exist_ok=True)
    assert "resumed at step 6" in resume(tmp_path, run, "--set", "train.steps=8", code=0)
