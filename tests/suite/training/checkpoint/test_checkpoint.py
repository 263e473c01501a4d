"""Damaged checkpoints: named, never used, and the one before is taken; another model's or version's are refused."""

import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from launch.backends.processes import run_processes
from suite.errors import CheckpointError
from suite.pipeline.runtime.stage import Stage
from suite.training.checkpoint import audit, check_model, list_checkpoints, load_optimizer, load_values, newest_valid
from suite.training.checkpoint.manifest import digest
from suite.training.checkpoint.reading import examine, folders_of
from suite.training.checkpoint.storage import BEGUN, Storage
from tests.suite.pipeline.build import CPU
from tests.suite.pipeline.toy import toy_layers
from tests.suite.training.checkpoint.fuzz import fuzz
from tests.suite.training.checkpoint.saves import layer_path, without_save_id
from tests.suite.training.checkpoint.seal import seal_again

pytestmark = pytest.mark.usefixtures("alone")


def newest(folder):
    """Returns (step taken or None, what was said)."""
    said = []
    found = newest_valid(folder, range(6), 6, said.append)
    return (found.step if found else None), said


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def write_manifest(text):
    return lambda path: (path / "manifest.json").write_text(text)


def edit_manifest(path):
    """Changes a field, as a hand would."""
    write_manifest((path / "manifest.json").read_text().replace('"step": ', '"step": 1'))(path)


def interrupt_save(path):
    """Makes a checkpoint what a save leaves that was interrupted."""
    (path / "manifest.json").unlink()
    (path / "begun-0").touch()


HARMS = {
    "flipped": (lambda path: flip(layer_path(path, 4)), "layer-0004.safetensors: its SHA-256 does not match"),
    "layer deleted": (lambda path: layer_path(path, 1).unlink(), "layer-0001.safetensors: missing"),
    "layer empty": (lambda path: layer_path(path, 0).write_bytes(b""), "layer-0000.safetensors: it has 0 bytes"),
    "manifest flipped": (lambda path: flip(path / "manifest.json"), "bad manifest: its seal"),
    "manifest edited": (edit_manifest, "bad manifest: its seal"),
    "manifest a list": (write_manifest("[]"), "bad manifest: its seal"),
    "manifest empty": (write_manifest(""), "bad manifest: it is not a manifest"),
    "manifest too deep": (write_manifest("[" * 100_000), "bad manifest: it is not a manifest"),
    "manifest deleted": (lambda path: (path / "manifest.json").unlink(), "its manifest.json is missing"),
    "emptied": (lambda path: [one.unlink() for one in path.iterdir()], "its manifest.json is missing"),
}
"""What is done to a checkpoint, and what is said of it."""


@pytest.mark.parametrize("harm", HARMS)
def test_a_damaged_checkpoint_is_named_and_the_one_before_taken(folder, harm):
    """And where the one before is damaged too, or was never finished, or is not there, none is: training from step 0
    would write over them."""
    change, reason = HARMS[harm]
    change(folder / "00000060")
    step, messages = newest(folder)
    assert step == 40
    (message,) = map(without_save_id, messages)
    assert "00000060 is not used: " in message
    assert reason in message
    another = [*HARMS][[*HARMS].index(harm) - 1]
    for older, named in ((another, ["00000040", HARMS[another][1]]), ("interrupted", []), ("none", [])):
        shutil.copytree(folder, folder.with_name(older))
        path = folder.with_name(older) / "00000040"
        {"interrupted": interrupt_save, "none": shutil.rmtree}.get(older, HARMS[another][0])(path)
        with pytest.raises(CheckpointError, match="restore") as refused:
            newest(path.parent)
        count = "the only checkpoint" if not named else "none of the 2 checkpoints"
        for part in (count, "00000060", reason, *named):
            assert part in without_save_id(str(refused.value)), refused.value


def test_a_checkpoint_under_the_name_of_another_step_or_of_an_interrupted_save_is_not_used(folder):
    shutil.move(folder / "00000060", folder / "00000061")
    step, messages = newest(folder)
    assert step == 40
    assert "00000061 is not used: bad manifest: it is of step 60" in messages[0]
    interrupt_save(folder / "00000061")
    step, messages = newest(folder)
    assert step == 40
    assert "00000061 is not used: no manifest, it was never finished" in messages[0]


def test_a_checkpoint_from_before_the_files_had_the_id_of_their_save_is_read(folder):
    newer = folder / "00000060"
    for layer in range(6):
        layer_path(newer, layer).rename(newer / f"layer-{layer:04d}.safetensors")
    seal_again(newer)
    assert newest(folder) == (60, [])


def test_a_run_whose_only_saves_were_interrupted_starts_at_step_0(folder):
    assert newest_valid(folder / "empty", range(6), 6, print) is None
    for path in folder.glob("0*"):
        interrupt_save(path)
    step, said = newest(folder)
    assert step is None
    assert len(said) == 2
    assert all("no manifest, it was never finished" in line for line in said)


def test_an_interrupted_save_stays_one_while_it_is_removed(folder, monkeypatch):
    interrupt_save(folder / "00000040")
    storage = Storage(folder)
    removed = []
    remove = storage.remove

    def noted(path):
        removed.append(path)
        remove(path)
        mark = {name for name in storage.names("00000040") if name.startswith(BEGUN)}
        assert mark, f"no mark shows that the checkpoint was begun: {removed}"

    monkeypatch.setattr(storage, "remove", noted)
    storage.remove_folder("00000040")
    assert len(removed) > 2
    assert not (folder / "00000040").exists()


def test_a_manifest_that_is_published_between_two_looks_is_read(folder, monkeypatch):
    storage, looks = Storage(folder), []
    size = storage.size

    def late(path):
        looks.append(path)
        if len(looks) == 1:
            raise FileNotFoundError(path)
        return size(path)

    monkeypatch.setattr(storage, "size", late)
    assert [type(examine(storage, folder)).__name__ for folder in folders_of(storage)] == ["Checkpoint"] * 2


def test_a_place_of_checkpoints_that_is_no_folder_is_refused(folder, tmp_path):
    """A link to a disk that is not mounted is no run without checkpoints."""
    for name, make in {
        "gone": lambda path: path.symlink_to(tmp_path / "not-mounted"),
        "circle": lambda path: path.symlink_to(path),
        "file": lambda path: path.write_text(""),
    }.items():
        make(tmp_path / name)
        with pytest.raises(CheckpointError, match=f"cannot be listed: .*{name}"):
            newest(tmp_path / name)
    (tmp_path / "link").symlink_to(folder)
    assert newest(tmp_path / "link") == (60, [])


def test_what_only_has_a_checkpoints_name_is_refused_where_nothing_else_is_there(folder, tmp_path):
    (folder / "00000080").write_text("")
    (folder / "000000090").mkdir()  # not a name that a save writes
    assert newest(folder)[0] == 60
    lone = tmp_path / "lone"
    lone.mkdir()
    (lone / "00000060").symlink_to(tmp_path / "gone")
    with pytest.raises(CheckpointError, match=r"the only checkpoint .*00000060"):
        newest(lone)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"files": {}}, "its field files: "),
        ({"notes": {"units": "12"}}, "its field notes: .*units is '12'"),
        ({"notes": {"units": -1}}, "its field notes: .*units is -1"),
        ({"notes": {"units": True}}, "its field notes: .*units is True"),
        ({"notes": {"wandb_run": 5}}, "its field notes: .*wandb_run is 5"),
    ],
)
def test_a_manifest_whose_fields_a_run_cannot_use_is_damaged(folder, changes, said):
    seal_again(folder / "00000060", **changes)
    step, messages = newest(folder)
    assert step == 40
    assert re.search(f"00000060 is not used: bad manifest: {said}", messages[0]), messages
    newer, older = audit(Storage(folder))
    assert re.search(said, newer.faults[0])
    assert older.faults == ()


def test_an_audit_names_every_fault(folder):
    flip(layer_path(folder / "00000060", 4))
    layer_path(folder / "00000060", 1).unlink()
    newer, older = audit(Storage(folder))
    assert [(one.step, one.checkpoint.good) for one in (newer, older)] == [(60, False), (40, True)]
    assert older.faults == ()
    assert [without_save_id(fault.split("/")[-1]) for fault in newer.faults] == [
        "layer-0001.safetensors: missing", "layer-0004.safetensors: its SHA-256 does not match the manifest",
    ]  # fmt: skip


@pytest.mark.parametrize(("format", "word"), [(3, "a newer"), (1, "an older"), ("x", "a newer")])
def test_another_versions_checkpoint_is_refused_by_name(folder, format, word):
    seal_again(folder / "00000060", format=format)
    with pytest.raises(CheckpointError, match=f"60/manifest.json has format {format!r}, written by {word} version"):
        newest(folder)
    assert [bool(one.faults) for one in audit(Storage(folder))] == [True, False]


def test_harmed_files_give_an_error_by_name_or_the_right_state(written, tmp_path):
    (ends,) = run_processes(fuzz, 1, written, tmp_path, 80, 1)
    assert sum(ends.values()) == 80
    assert min(ends[end] for end in ("the one before", "refused by name", "of this model")) > 0


def test_missing_and_extra_layers_are_refused_by_name(folder):
    for count, said in (
        (5, r"has 6 layers, this model 5 .layer-0005\.\w+\.safetensors extra"),
        (8, "layer 6 to layer 7 missing"),
    ):
        with pytest.raises(CheckpointError, match=said):
            newest_valid(folder, range(5), count, print)


@pytest.fixture(scope="module")
def stage():
    return Stage(toy_layers(), [range(6)], None, CPU, "fp32", 7)


def changed(folder, change):
    """Returns the newest checkpoint, layer 1 of it changed and sealed again as its writer would."""
    path = layer_path(folder / "00000060", 1)
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
        (lambda t: t.update({"value/mix.bias": torch.ones(7)}), r"mix.bias is \(7,\), the model has \(6,\)"),
        (lambda t: t.update({"value/mix.bias": torch.ones(6).half()}), "mix.bias is torch.float16, the model has"),
    ],
)
def test_another_models_layer_is_refused_with_what_differs(folder, stage, change, said):
    with pytest.raises(CheckpointError, match=rf"layer 1 of .*00000060 does not match this model: {said}"):
        load_values(changed(folder, change), stage)
    with pytest.raises(CheckpointError, match=rf"layer 1 of .*00000060 does not match this model: {said}"):
        check_model(list_checkpoints(folder, print)[0], stage.layers)


def test_the_own_model_passes_the_check_and_a_damaged_file_is_left_to_who_loads_it(folder, stage):
    newest = list_checkpoints(folder, print)[0]
    check_model(newest, stage.layers)
    layer_path(folder / "00000060", 1).write_bytes(b"no header")
    check_model(newest, stage.layers)
    with pytest.raises(CheckpointError, match="has 6 layers, this model 5"):
        check_model(newest, stage.layers[:5])


def test_a_tensor_of_no_known_kind_is_refused(folder):
    with pytest.raises(CheckpointError, match=r"layer-0001\.\w+\.safetensors: it has unexpected tensors: other/x"):
        changed(folder, lambda tensors: tensors.update({"other/x": torch.ones(1)}))


def test_state_of_what_is_no_parameter_is_refused(folder, stage):
    class Takes:
        def __init__(self):
            self.stage = stage

        def load_state(self, key, state):
            pass

    found = changed(folder, lambda tensors: tensors.update({"state/mox.weight/step": torch.ones(())}))
    with pytest.raises(CheckpointError, match=r"layer 1 of .* this model does not train: mox.weight/step"):
        load_optimizer(found, Takes())


def test_the_bytes_that_were_verified_are_those_that_are_loaded(folder, stage):
    found = list_checkpoints(folder, print)[0]
    found.layers.update((layer, found.read(layer)) for layer in range(6))
    for path in (folder / "00000060").iterdir():
        path.write_bytes(b"")
    load_values(found, stage)
    assert digest(b"") not in {file.sha256 for file in found.manifest.files.values()}
