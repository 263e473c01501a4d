"""Continuing a run loses nothing: an earlier step, storage that does not answer, a second driver."""

import errno
import json
import os
import shutil

import pytest

from launch.backends.processes import run_processes
from suite.errors import StorageError
from suite.training.checkpoint import Saver, Storage, abandon_later, audit, in_order, list_checkpoints
from suite.training.checkpoint.ownership import OWNER, check_owner, claim
from suite.training.checkpoint.retention import KEEP_BEST, mark, rotate
from tests.suite.pipeline.build import join
from tests.suite.training.checkpoint.saves import LAYERS, Counting, newest_of

pytestmark = pytest.mark.usefixtures("alone")


@pytest.mark.parametrize(
    ("call", "path", "error"),
    [
        ("read", "00000060/layer-0004", errno.ESTALE),
        ("size", "00000060/manifest", errno.EIO),
        ("read", "00000060/manifest", errno.EIO),
        ("names", "00000060", errno.ESTALE),
        ("folders", "", errno.EIO),
    ],
)
def test_storage_that_does_not_answer_is_no_damage_and_nothing_else_is_chosen(folder, monkeypatch, call, path, error):
    original = getattr(Storage, call)

    def fails(self, *arguments):
        if not arguments or arguments[0].startswith(path):
            raise OSError(f"{self.location}/{path}: {errno.errorcode[error]}")
        return original(self, *arguments)

    monkeypatch.setattr(Storage, call, fails)
    with pytest.raises(StorageError, match=errno.errorcode[error]):
        newest_of(folder)
    monkeypatch.undo()
    assert newest_of(folder).step == 60


@pytest.mark.parametrize("failures", [1, 99])
def test_a_folder_that_the_disk_does_not_find_at_once_is_no_damage(folder, monkeypatch, failures):
    """As an NFS client whose server restarts: ``os.path.isdir`` would be False."""
    original, asked = os.stat, []

    def stat(path, **options):
        if str(path).endswith("/00000060"):
            asked.append(path)
            if len(asked) <= failures:
                raise OSError(errno.ESTALE, "Stale file handle")
        return original(path, **options)

    monkeypatch.setattr(os, "stat", stat)
    monkeypatch.setattr("suite.training.checkpoint.storage.PAUSES_S", (0.0, 0.0))
    if failures == 1:
        assert newest_of(folder).step == 60
    else:
        with pytest.raises(StorageError, match="Stale file handle"):
            newest_of(folder)


def test_colons_in_a_path_are_no_chain_of_urls(tmp_path):
    Storage(tmp_path / "a::b/runs").write("00000001/manifest.json", b"x")
    assert (tmp_path / "a::b/runs/00000001/manifest.json").read_bytes() == b"x"


def test_a_worker_that_cannot_read_ends_the_load_on_all(folder):
    assert run_processes(loads_half, 2, str(folder)) == [True, True]


def loads_half(rank, world, rendezvous, folder):
    join(rank, world, rendezvous)
    if rank == 1:

        def fails(self, path, size, read=Storage.read):
            if "layer" in path:
                raise OSError(f"{path}: Stale file handle")
            return read(self, path, size)

        Storage.read = fails
    try:
        newest_of(folder)
    except StorageError:
        return True
    return False


def test_checkpoints_after_the_step_that_a_run_continues_from_are_kept_and_not_used(folder):
    abandon_later(Storage(folder), 40)
    assert newest_of(folder).step == 40
    assert [(found.step, found.abandoned) for found in list_checkpoints(folder, print)] == [(60, True), (40, False)]
    assert [(found.step, found.checkpoint.abandoned) for found in audit(Storage(folder))] == [(60, True), (40, False)]
    for choice, step in ((None, 40), ("latest", 40), (60, 60)):
        assert in_order(list_checkpoints(folder, print), choice, "the run")[0].step == step
    abandon_later(Storage(folder), 60)  # back to the later one
    assert newest_of(folder).step == 60


def test_abandoned_checkpoints_are_removed_once_the_next_one_is_published(folder):
    abandon_later(Storage(folder), 40)
    shutil.copytree(folder / "00000040", folder / "00000050")
    rotate(Storage(folder), 50)
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == ["00000040", "00000050"]
    for left in folder.glob("*/manifest.json"):
        shutil.copytree(left.parent, folder / f"{int(left.parent.name) + 40:08d}")
    abandon_later(Storage(folder), 50)  # 80 and 90
    shutil.copytree(folder / "00000050", folder / "00000100")
    (folder / "00000100" / "abandoned").unlink(missing_ok=True)
    rotate(Storage(folder), 100)
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == ["00000050", "00000100"]


def test_a_damaged_checkpoint_that_was_skipped_counts_for_nothing(folder):
    """It lies beyond the step of the resume, and later saves pass it."""
    mark(Storage(folder), "00000040", KEEP_BEST)
    mark(Storage(folder), "00000060", KEEP_BEST)  # the damaged one
    for step in (50, 70):
        shutil.copytree(folder / "00000040", folder / f"{step:08d}")
        (folder / f"{step:08d}" / "best").unlink()
        rotate(Storage(folder), step, stale={"00000060"})
    assert sorted(path.name for path in folder.glob("0*")) == ["00000040", "00000050", "00000070"]


class Refusing(Storage):
    """Refuses manifests."""

    def write(self, path, data):
        if path.endswith("manifest.json"):
            raise OSError("full")
        super().write(path, data)


def replace_abandoned(rank, world, rendezvous, location, storage_class):
    """Saves step 2 in place of an abandoned checkpoint, after a resume from step 1."""
    one = Counting(rank, world, rendezvous, location)
    one.save(1, 2)
    abandon_later(Storage(location), 1)
    later = Saver(storage_class(location), one.update, lambda units: {}, print, 1, 60.0, owner="b")
    one.become(2.5)
    later.save(2, 0)
    later.wait()
    checkpoints = list_checkpoints(location, print)
    values = {float(v) for name, value in checkpoints[0].read(0).items() if "step" not in name for v in value.flatten()}
    return (
        [(found.step, found.abandoned) for found in checkpoints],
        values,
        len(list((location / "00000002").iterdir())),
    )


@pytest.mark.parametrize("storage_class", [Storage, Refusing])
def test_an_abandoned_checkpoint_stays_until_a_save_of_its_step_replaces_it(tmp_path, storage_class):
    ((steps, found, files),) = run_processes(replace_abandoned, 1, tmp_path, storage_class)
    replaced = storage_class is Storage
    assert steps == [(2, not replaced), (1, False)]
    assert found == {2.5 if replaced else 2.0}
    assert not replaced or files == LAYERS + 1  # and nothing of the other


def test_a_loaded_checkpoint_knows_the_best_one_that_is_still_there(folder):
    assert newest_of(folder).best_step is None
    mark(Storage(folder), "00000060", KEEP_BEST)
    assert newest_of(folder).best_step == 60
    abandon_later(Storage(folder), 40)
    assert newest_of(folder).best_step is None
    mark(Storage(folder), "00000040", KEEP_BEST)
    assert newest_of(folder).best_step == 40


def owns(rank, world, rendezvous, folder, harm):
    """Saves twice; before the second save the checkpoints go to another driver, or their disk is gone."""
    said = []
    one = Counting(rank, world, rendezvous, folder, log=said.append)
    one.save(1)
    if harm == "claimed":
        claim(Storage(folder), "another driver")
    else:
        shutil.move(folder, f"{folder}-unmounted")
    one.save(2)
    return said


def test_a_driver_that_lost_the_checkpoints_to_another_writes_and_removes_nothing(tmp_path):
    (said,) = run_processes(owns, 1, str(tmp_path / "run"), "claimed")
    assert "belongs to another driver of this run (another driver, not " in said[0]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["00000001", OWNER]


def test_nothing_is_written_where_a_disk_was(tmp_path):
    (said,) = run_processes(owns, 1, str(tmp_path / "run"), "gone")
    assert "owner.json is missing: the folder was moved, or its disk is not mounted" in said[0]
    assert not (tmp_path / "run").exists()


def test_an_unreadable_record_of_the_owner_is_another_owner(folder):
    claim(Storage(folder), "me")
    check_owner(Storage(folder), "me")
    for text in ("", "[]", json.dumps({"owner": "you"})):
        (folder / OWNER).write_text(text)
        with pytest.raises(OSError, match="another driver"):
            check_owner(Storage(folder), "me")
