"""Damaged checkpoints: named, never used, and the one before is taken; another model's or version's are refused."""

import json
import shutil

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from launch.spawn import run_processes
from suite.errors import CheckpointError
from suite.pipeline.stage import Stage
from suite.training.checkpoint import audit, list_checkpoints, load_optimizer, load_values, newest_valid
from suite.training.checkpoint.manifest import digest
from suite.training.checkpoint.retention import KEEP
from suite.training.checkpoint.storage import Storage
from tests.pipeline.build import CPU, join
from tests.pipeline.toy import toy_layers
from tests.training.fuzz import fuzz
from tests.training.seal import seal_again
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


@pytest.fixture(scope="module", autouse=True)
def alone(tmp_path_factory):
    """This process is a worker without others."""
    join(0, 1, f"file://{tmp_path_factory.mktemp('meeting')}/rendezvous", torch.get_num_threads())
    yield
    dist.destroy_process_group()


def newest(folder):
    """Returns (step taken or None, what was said)."""
    said = []
    found = newest_valid(folder, range(6), 6, said.append)
    return (found.step if found else None), said


def _newest(rank, world, rendezvous, folder):
    join(rank, world, rendezvous)
    said = []
    found = newest_valid(folder, range(3 * rank, 3 * rank + 3), 6, said.append)
    return (found.step if found else None), said


def test_the_newest_is_taken_and_older_ones_were_removed(folder):
    assert newest(folder) == (60, [])
    assert len(list(folder.iterdir())) == KEEP


def test_workers_that_read_half_of_the_layers_each_take_the_same(folder):
    flip(folder / "00000060/layer-0004.safetensors")
    first, second = run_processes(_newest, 2, str(folder))
    assert first[0] == second[0] == 40
    assert "layer-0004.safetensors: its SHA-256 is not" in first[1][0]
    assert second[1] == []  # the first speaks


def test_a_checkpoint_holds_its_layers_its_manifest_and_the_proof_of_later_steps(folder):
    files = {f"layer-{layer:04d}.safetensors" for layer in range(6)} | {"manifest.json"}
    assert {path.name for path in (folder / "00000060").iterdir()} == files
    assert {path.name for path in (folder / "00000040").iterdir()} == files | {"good"}


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda f: flip(f / "00000060/layer-0004.safetensors"), "layer-0004.safetensors: its SHA-256 is not"),
        (lambda f: (f / "00000060/layer-0001.safetensors").unlink(), "layer-0001.safetensors: missing"),
        (lambda f: (f / "00000060/layer-0000.safetensors").write_bytes(b""), "layer-0000.safetensors: it has 0 bytes"),
        (lambda f: (f / "00000060/manifest.json").unlink(), "no manifest, it was never finished"),
        (lambda f: (f / "00000060/manifest.json").write_text('{"step": 60'), "bad manifest: it is no manifest"),
        (lambda f: (f / "00000060/manifest.json").write_text("[" * 100_000), "bad manifest: it is no manifest"),
        (lambda f: (f / "00000060/manifest.json").write_text("[]"), "bad manifest: its seal"),
        (lambda f: flip(f / "00000060/manifest.json"), "bad manifest: its seal"),
        (lambda f: shutil.move(f / "00000060", f / "00000061"), "00000061 is not used: bad manifest: it is of step 60"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_taken(folder, harm, said):
    harm(folder)
    step, messages = newest(folder)
    assert step == 40
    assert any("0000006" in line and " is not used: " in line and said in line for line in messages), messages


def test_a_manifest_with_another_step_than_was_written_is_refused(folder):
    path = folder / "00000060/manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "step": 59}))
    said = []
    assert [c.step for c in list_checkpoints(folder, said.append)] == [40]
    assert "its seal does not agree" in said[0]


def test_none_finished_is_none(folder):
    for path in folder.glob("*/manifest.json"):
        path.unlink()
    assert newest(folder)[0] is None


def test_finished_but_all_damaged_is_no_beginning_from_nothing(folder):
    for path in folder.glob("*/layer-0002.safetensors"):
        flip(path)
    with pytest.raises(CheckpointError, match=r"none of the 2 checkpoints .* is whole .*00000060/layer-0002"):
        newest(folder)
    shutil.rmtree(folder / "00000060")  # before the first checkpoint there is the beginning
    step, said = newest(folder)
    assert step is None
    assert "00000040 is not used: " in said[0]


def test_manifests_that_are_all_damaged_are_no_beginning_from_nothing_either(folder):
    (folder / "00000060/layer-0002.safetensors").unlink()
    (folder / "00000040/manifest.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"none of the 2 checkpoints .* is whole .*bad manifest"):
        newest(folder)
    (folder / "00000060/manifest.json").write_bytes(b"")
    with pytest.raises(CheckpointError, match="none of the 2 checkpoints"):
        newest(folder)


def test_an_audit_names_every_fault(folder):
    flip(folder / "00000060/layer-0004.safetensors")
    (folder / "00000060/layer-0001.safetensors").unlink()
    newer, older = audit(Storage(folder))
    assert [(one.step, one.good) for one in (newer, older)] == [(60, False), (40, True)]
    assert older.faults == ()
    assert [fault.split("/")[-1] for fault in newer.faults] == [
        "layer-0001.safetensors: missing", "layer-0004.safetensors: its SHA-256 is not the manifest's",
    ]  # fmt: skip


@pytest.mark.parametrize(("format", "word"), [(3, "a newer"), (1, "an older"), ("x", "a newer")])
def test_another_versions_checkpoint_is_refused_by_name(folder, format, word):
    seal_again(folder / "00000060", format=format)
    with pytest.raises(CheckpointError, match=f"60/manifest.json has format {format!r}, written by {word} version"):
        newest(folder)
    assert [bool(one.faults) for one in audit(Storage(folder))] == [True, False]


def test_three_hundred_harmed_files_give_an_error_by_name_or_the_right_state(written, tmp_path):
    (ends,) = run_processes(fuzz, 1, written, tmp_path, 300, 1)
    assert sum(ends.values()) == 300
    assert min(ends[end] for end in ("the one before", "refused by name", "of this model")) > 0


def test_missing_and_extra_layers_are_refused_by_name(folder):
    for count, said in (
        (5, "has 6 layers, this model 5 .layer-0005.safetensors extra"),
        (8, "0007.safetensors missing"),
    ):
        with pytest.raises(CheckpointError, match=said):
            newest_valid(folder, range(5), count, print)


@pytest.fixture(scope="module")
def stage():
    return Stage(toy_layers(), [range(6)], None, CPU, "fp32", 7)


def changed(folder, change):
    """Returns the newest checkpoint, layer 1 of it changed and sealed again as its writer would."""
    path = folder / "00000060/layer-0001.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    seal_again(folder / "00000060")
    found = list_checkpoints(folder, print)[0]
    found.layers.update((layer, found.read(layer)) for layer in range(6))
    return found


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop("value/mix.bias"), "mix.bias is missing"),
        (lambda t: t.update({"value/more": torch.ones(2)}), "more is extra"),
        (lambda t: t.update({"value/mix.bias": torch.ones(7)}), r"mix.bias is \(7,\) there and \(6,\) here"),
        (lambda t: t.update({"value/mix.bias": torch.ones(6).half()}), "mix.bias is torch.float16 there"),
    ],
)
def test_another_models_layer_is_refused_with_what_differs(folder, stage, change, said):
    with pytest.raises(CheckpointError, match=rf"layer 1 of .*00000060 is not this model's: {said}"):
        load_values(changed(folder, change), stage)


def test_a_tensor_of_no_known_kind_is_refused(folder):
    with pytest.raises(CheckpointError, match=r"layer-0001.safetensors: it holds other/x"):
        changed(folder, lambda tensors: tensors.update({"other/x": torch.ones(1)}))


def test_state_of_what_is_no_parameter_is_refused(folder, stage):
    class Takes:
        def load_state(self, key, state):
            pass

    found = changed(folder, lambda tensors: tensors.update({"state/mox.weight/step": torch.ones(())}))
    with pytest.raises(CheckpointError, match=r"layer 1 of .* state of what is no parameter of it: mox.weight/step"):
        load_optimizer(found, stage, Takes())


def test_the_bytes_that_were_verified_are_those_that_are_loaded(folder, stage):
    found = list_checkpoints(folder, print)[0]
    found.layers.update((layer, found.read(layer)) for layer in range(6))
    for path in (folder / "00000060").iterdir():
        path.write_bytes(b"")
    load_values(found, stage)
    assert digest(b"") not in {file.sha256 for file in found.manifest.files.values()}
