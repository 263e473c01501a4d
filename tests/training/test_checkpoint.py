"""Damaged checkpoints: named, never used, and the one before is taken."""

import json
import shutil

import pytest

from launch.spawn import run_processes
from suite.errors import CheckpointError
from suite.training.checkpoint import KEEP, Checkpoint, list_checkpoints
from tests.pipeline.build import build, join
from tests.pipeline.toy import Block, SumLoss, toy_layers
from tests.training.work import run


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Three checkpoints were due, at 20, 40 and 60; the newest two are kept."""
    folder = tmp_path_factory.mktemp("checkpoints")
    run_processes(run, 1, 1, 1, 60, str(folder))
    return folder


@pytest.fixture
def folder(written, tmp_path):
    return shutil.copytree(written, tmp_path / "copy")


def newest(folder):
    """Returns (step taken or None, what was said), from two workers that read half of the layers each."""
    return run_processes(_newest, 2, str(folder))[0]


def _newest(rank, world, rendezvous, folder):
    from pathlib import Path

    from suite.training.checkpoint import newest_valid

    join(rank, world, rendezvous)
    said = []
    found = newest_valid(Path(folder), range(3 * rank, 3 * rank + 3), said.append)
    return (found.step if found else None), said


def test_the_newest_is_taken_and_older_ones_were_removed(folder):
    assert newest(folder) == (60, [])
    assert len(list(folder.iterdir())) == KEEP


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda f: flip(f / "00000060/layer-0004.safetensors"), "layer-0004.safetensors: its SHA-256 is not"),
        (lambda f: (f / "00000060/layer-0001.safetensors").unlink(), "layer-0001.safetensors: missing"),
        (lambda f: (f / "00000060/layer-0000.safetensors").write_bytes(b""), "layer-0000.safetensors: its SHA-256"),
        (lambda f: (f / "00000060/manifest.json").unlink(), "no manifest, it was never finished"),
        (lambda f: (f / "00000060/manifest.json").write_text('{"step": 60'), "bad manifest"),
        (lambda f: (f / "00000060/manifest.json").write_text("[]"), "bad manifest"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_taken(folder, harm, said):
    harm(folder)
    step, messages = newest(folder)
    assert step == 40
    assert any("00000060 is not used" in line and said in line for line in messages), messages


def test_a_manifest_with_another_step_than_was_written_is_refused(folder):
    path = folder / "00000060/manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "step": 59}))
    said = []
    assert [c.step for c in list_checkpoints(folder, said.append)] == [40]
    assert "its own digest does not agree" in said[0]


def test_nothing_usable_is_none(folder):
    for path in folder.glob("*/manifest.json"):
        path.unlink()
    assert newest(folder)[0] is None


def wrong_model(rank, world, rendezvous, folder):
    from pathlib import Path

    from suite.pipeline.topology import Place
    from suite.training.checkpoint import load_values

    join(rank, world, rendezvous)
    import torch

    layers = toy_layers()
    with torch.device("meta"):
        layers[2] = torch.nn.Sequential(Block())
    executor, *_ = build(Place(0, 1, 1), layers[:2], SumLoss(), "never")
    executor.stage.layers[1] = layers[2]
    found = list_checkpoints(Path(folder), print)[0]
    assert isinstance(found, Checkpoint)
    load_values(found, executor.stage)


def test_a_checkpoint_of_another_model_is_refused_with_what_differs(folder):
    with pytest.raises(CheckpointError, match=r"layer 1 of .* is not this model's: .*mix.weight"):
        run_processes(wrong_model, 1, str(folder))
