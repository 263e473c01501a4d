"""Saving beside the training: what is saved, what a failure does, what stays, and what a kill leaves."""

import os
import resource
import shutil
import threading
import time
from collections import Counter
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from launch.backends.processes import run_processes
from suite.errors import CheckpointError
from suite.training.checkpoint import (
    Readers,
    Storage,
    list_checkpoints,
    load_optimizer,
    load_values,
    newest_valid,
    reading,
    writing,
)
from suite.training.checkpoint.async_save import ManifestJob
from suite.training.checkpoint.ownership import OWNER
from suite.training.checkpoint.reading import UNFINISHED, examine, folders_of
from suite.training.checkpoint.retention import KEEP_LATEST, steps_to_keep
from suite.training.checkpoint.storage import BEGUN
from tests.suite.training.checkpoint.saves import (
    LAYERS,
    Counting,
    kill_during_saves,
    layer_path,
    restored,
    without_save_id,
)


class Gated(Storage):
    """A disk that is busy until it is let go."""

    def __init__(self, location):
        super().__init__(location)
        self.open = threading.Event()

    def write(self, path, data):
        assert path == OWNER or self.open.wait(60)
        super().write(path, data)


def goes_on(rank, world, rendezvous, folder):
    disk = Gated(folder)
    one = Counting(rank, world, rendezvous, disk)
    one.become(5)
    one.saver.save(5, 0)
    one.become(6)  # while nothing is written yet
    before = os.listdir(folder)
    disk.open.set()
    one.saver.wait()
    return before, restored(folder)


def test_training_goes_on_while_a_save_is_written_and_the_state_is_that_of_the_save_point(tmp_path):
    assert run_processes(goes_on, 1, str(tmp_path)) == [([OWNER], 5)]


def outlives_its_save_point(rank, world, rendezvous, folder):
    """Returns what is logged, what is restored while the save of step 1 is late, after it and after that of step 3, and
    the steps that were given up."""
    said, found, disk = [], [], Gated(folder)
    one = Counting(rank, world, rendezvous, disk, log=said.append, deadline_s=0.1)
    for step in (1, 2):
        one.become(step)
        one.saver.save(step, 0)
        one.saver.wait()
    found.append(restored(folder))
    disk.open.set()
    join_save(1)
    found.append(restored(folder))
    one.become(3)
    one.saver.save(3, 0)
    join_save(3)
    found.append(restored(folder))
    return said, found, one.failed


def join_save(step):
    """Waits for the thread of a save: the deadline of a save point could pass on a busy machine."""
    for thread in threading.enumerate():
        if thread.name == f"save of step {step}":
            thread.join(60)


def test_a_save_that_outlives_its_save_point_is_published_and_no_other_begins_before_it_has_ended(tmp_path):
    ((said, found, failed),) = run_processes(outlives_its_save_point, 1, str(tmp_path))
    assert (found, failed) == ([0, 1, 3], [1, 2])
    assert "the checkpoint of step 1 was not written (replica 0, stage 0: no layer written within 0 s)" in said[0]
    assert "still busy with the save of step 1" in said[1]


class Slow(Storage):
    """A disk that takes three quarters of a deadline for each layer."""

    def write(self, path, data):
        time.sleep(0.75 if "layer-" in path else 0)
        super().write(path, data)


def waits_for_progress(rank, world, rendezvous, folder):
    """Returns what is logged, what is restored, how many seconds the save point waited, and how often it told of
    progress."""
    said = []
    one = Counting(rank, world, rendezvous, Slow(folder), log=said.append, deadline_s=1.0)
    one.become(1)
    one.saver.save(1, 0)
    begin = time.monotonic()
    one.saver.wait()
    return said, restored(folder), time.monotonic() - begin, len(one.progress)


def test_a_save_point_waits_longer_than_its_deadline_while_layers_are_written(tmp_path):
    """Of two stages with three layers each."""
    for said, found, seconds, told in run_processes(waits_for_progress, 2, str(tmp_path)):
        assert (said, found) == ([], 1)
        assert seconds > 2 * 0.75
        assert told >= 1


class Counted(Storage):
    """Notes which layers are written and read."""

    def __init__(self, location, layers):
        super().__init__(location)
        self._layers = layers

    def write(self, path, data):
        self._note("writes", path)
        super().write(path, data)

    def read(self, path, size):
        self._note("reads", path)
        return super().read(path, size)

    def _note(self, what, path):
        if "layer-" in path:
            self._layers.append((what, int(path.rpartition("layer-")[2][:4])))


def shared(rank, world, rendezvous, folder, damaged):
    """Two replicas of two stages save twice and load. Returns what this worker wrote and read, the step that it loaded,
    its values, the replica whose buffer it has, and whether it still holds what it read."""
    noted, said = [], []
    one = Counting(rank, world, rendezvous, Counted(folder, noted), replicas=2, buffers=(2,))
    for step in (1, 2):
        one.become(step)
        one.saver.save(step, 0)
    one.saver.finish(2, 0)
    dist.barrier()
    if rank == 0 and damaged is not None:
        path = layer_path(Path(folder) / "00000002", damaged)
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    dist.barrier()
    one.become(9)
    with patch.object(reading, "Storage", partial(Counted, layers=noted)):
        readers = Readers(one.coord, one.groups.data_parallel)
        found = newest_valid(folder, one.stage.indices, LAYERS, said.append, readers=readers)
    assert found.layers.keys() == {*one.stage.indices}
    load_values(found, one.stage)
    load_optimizer(found, one.update)
    state = [value for key in one.stage.named_parameters() for value in one.update.state(key).values()]
    values = {
        float(number) for value in (*one.stage.layers.parameters(), *state) for number in value.detach().flatten()
    }
    buffers = [int(buffer) for buffer in one.stage.layers.buffers()]
    return sorted(noted), found.step, values, buffers, found.layers, said


@pytest.mark.parametrize("damaged", [None, 4])
def test_replicas_share_writing_and_reading_and_all_have_the_same(tmp_path, damaged):
    """Layers 0 to 2 are of stage 0, 3 to 5 of stage 1. Layer 2 has a buffer, in which replicas may differ."""
    found = run_processes(shared, 4, str(tmp_path), damaged)
    written = [sorted({layer for what, layer in noted if what == "writes"}) for noted, *_ in found]
    assert written == [[0, 2], [4], [1], [3, 5]]  # ranks: stages of replica 0, then of replica 1
    reads = Counter(layer for noted, *_ in found for what, layer in noted if what == "reads")
    tries = 1 if damaged is None else 2
    assert reads == dict.fromkeys(range(LAYERS), tries)
    step = 2 if damaged is None else 1
    for rank, (_, loaded, values, buffers, left, said) in enumerate(found):
        assert (loaded, values, left) == (step, {float(step)}, {})
        assert buffers == ([0] if rank % 2 == 0 else [])
        assert bool(said) == (damaged is not None and rank == 0)


def limit(size):
    """Every write beyond ``size`` bytes of a file fails in this process, as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def fails(rank, world, rendezvous, folder):
    """Three saves that cannot be written by one of the workers, one that can, and then no more."""
    said = []
    one = Counting(rank, world, rendezvous, folder, log=said.append)
    seen = []
    for step in range(1, 9):
        if rank == 1:
            limit(resource.RLIM_INFINITY if step in (1, 4) else 300)
        one.become(step)
        try:
            one.saver.save(step, 0)
            one.saver.wait()
        except CheckpointError as error:
            return seen, said, step, str(error)
        seen.append((restored(folder), len(Storage(folder).folders())))
    return seen, said, None, None


def test_a_save_that_fails_is_said_leaves_the_old_one_and_is_tried_again_but_not_for_ever(tmp_path):
    first, second = run_processes(fails, 2, str(tmp_path))
    assert first[0] == [(1, 1), (1, 1), (1, 1), (4, 2), (4, 2), (4, 2), (4, 2)]  # what was half written is gone
    said, step, ended = first[1:]
    assert len(said) == 5
    assert "the checkpoint of step 2 was not written (replica 0, stage 1: " in said[0]
    assert "File too large); training continues; the newest checkpoint is of step 1" in said[0]
    assert step == second[2] == 8
    assert ended == second[3]
    for part in ("3 checkpoints in a row", str(tmp_path), "the newest checkpoint is of step 4", "File too large"):
        assert part in ended


def keeps_the_best(rank, world, rendezvous, folder):
    """Returns which checkpoints there are after each save, and which of them are marked; 3 cannot be written."""
    one, seen = Counting(rank, world, rendezvous, folder), []
    for step in range(1, 9):
        limit(300 if step == 3 else resource.RLIM_INFINITY)
        one.become(step)
        one.saver.save(step, 0, best=step in (1, 2, 3, 7))
        one.saver.wait()
        there = sorted(Storage(folder).folders())
        seen.append(" ".join(f"{int(name)}{'*' * Path(folder, name, 'best').exists()}" for name in there))
    return seen, [(each.step, each.best) for each in list_checkpoints(folder, print)], one.failed


def test_the_best_checkpoint_is_kept_until_a_better_one_is_published(tmp_path):
    ((seen, found, failed),) = run_processes(keeps_the_best, 1, str(tmp_path))
    assert failed == [3]
    assert seen == ["1*", "1* 2*", "1* 2*", "2* 4", "2* 4 5", "2* 5 6", "6 7*", "7* 8"]
    assert found == [(8, False), (7, True)]


def lasts(rank, world, rendezvous, folder, failures):
    """The disk is full for some of the tries to save the last step."""

    def log(text):
        said.append(text)
        if len(said) == failures:
            limit(resource.RLIM_INFINITY)

    said = []
    one = Counting(rank, world, rendezvous, folder, log=log)
    one.become(1)
    limit(300)
    one.saver.save(1, 0)
    try:
        one.saver.finish(1, 0)
    except CheckpointError as error:
        return restored(folder), str(error), one.failed
    return restored(folder), None, one.failed


def test_the_last_save_is_tried_again_and_a_run_without_it_ends_with_an_error(tmp_path):
    assert run_processes(lasts, 1, str(tmp_path / "mended"), 2) == [(1, None, [])]  # not given up
    ((step, message, _),) = run_processes(lasts, 1, str(tmp_path / "full"), 3)
    assert step == 0
    assert "3 checkpoints in a row could not be written" in message
    assert "there is no checkpoint yet" in message


def in_a_store(rank, world, rendezvous, place):
    """Returns what lies in an object store after saves, and what is loaded from it."""
    one = Counting(rank, world, rendezvous, place)
    for step in (1, 2, 3):
        one.become(step)
        one.saver.save(step, 0)
    one.saver.finish(3, 0)
    one.become(9)
    found = newest_valid(place, range(LAYERS), LAYERS, print)
    load_values(found, one.stage)
    load_optimizer(found, one.update)
    values = {float(value) for p in one.stage.layers.parameters() for value in p.detach().flatten()}
    storage = Storage(place)
    names = {folder: sorted(map(without_save_id, storage.names(folder))) for folder in storage.folders()}
    return found.step, values, names


def check_store(place):
    ((step, values, files),) = run_processes(in_a_store, 1, place)
    assert (step, values) == (3, {3.0})
    layers = [f"layer-{layer:04d}.safetensors" for layer in range(LAYERS)]
    assert files == {"00000003": [*layers, "manifest.json"], "00000002": ["good", *layers, "manifest.json"]}


def test_an_object_store_serves_as_a_folder_does():
    check_store("memory://bucket/run")


def test_a_store_of_no_known_kind_is_a_sentence():
    with pytest.raises(CheckpointError, match="cannot store checkpoints at nostore://bucket"):
        Storage("nostore://bucket")


def resumes_before(rank, world, rendezvous, folder):
    """Saves 1, 2, 3, is taken up at 1 (2 and 3 were damaged, say) and saves 2 anew."""
    one = Counting(rank, world, rendezvous, folder)
    for step in (1, 2, 3):
        one.become(step)
        one.saver.save(step, 0)
    one.saver.wait()


def again(rank, world, rendezvous, folder):
    one = Counting(rank, world, rendezvous, folder, start=2)
    one.become(3)
    one.saver.finish(3, 0)


def test_a_future_that_a_resume_gave_up_is_written_over(tmp_path):
    run_processes(resumes_before, 1, str(tmp_path))
    layer_path(tmp_path / "00000003", 0).write_bytes(b"damaged")
    (tmp_path / "00000003/good").touch()
    (tmp_path / "00000007").mkdir()
    run_processes(again, 1, str(tmp_path))
    assert restored(tmp_path) == 3
    assert sorted(os.listdir(tmp_path)) == ["00000002", "00000003", OWNER]
    assert not (tmp_path / "00000003/good").exists()


def marks_good(rank, world, rendezvous, folder):
    """Returns the step that each of four saves marks as good; no step between the second and the third is finite."""
    one, marked = Counting(rank, world, rendezvous, folder), []

    def job(notes, good_step, *rest):
        marked.append(good_step)
        return ManifestJob(notes, good_step, *rest)

    writing.ManifestJob = job
    for step in (1, 2):
        one.become(step)
        one.saver.save(step, 0)
    one.saver.save(3, 0)
    one.become(4)
    one.saver.save(4, 0)
    one.saver.wait()
    return marked


def test_a_checkpoint_is_good_once_a_finite_step_followed_it(tmp_path):
    assert run_processes(marks_good, 1, str(tmp_path)) == [[None, 1, None, 3]]


@given(st.lists(st.booleans(), max_size=60))
def test_retention_keeps_the_newest_and_never_loses_the_last_good_one(finite):
    """A save at each step; whether a finite step follows it is known before the next one."""
    there: set[int] = set()
    good: set[int] = set()
    for step, follows in enumerate(finite, 1):
        before, there = there, steps_to_keep(there | {step}, good)
        assert there <= before | {step}
        assert set(sorted(before | {step})[-KEEP_LATEST:]) <= there
        assert len(there) <= KEEP_LATEST + 1
        assert not good or max(good) in there
        good |= {step} if follows else set()


def test_kills_during_saves_leave_the_state_before_or_the_new_one(tmp_path):
    assert sum(kill_during_saves(str(tmp_path), 4, seed=1)) == 4


def test_retention_removes_a_link_and_leaves_what_it_leads_to(tmp_path):
    place, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    run_processes(resumes_before, 1, str(place))
    shutil.copytree(place / "00000002", elsewhere)
    before = {path.name: path.read_bytes() for path in elsewhere.iterdir()}
    (place / "00000001").symlink_to(elsewhere)
    run_processes(again, 1, str(place))
    assert sorted(os.listdir(place)) == ["00000002", "00000003", OWNER]
    assert {path.name: path.read_bytes() for path in elsewhere.iterdir()} == before


def test_retention_leaves_a_file_that_is_named_like_a_checkpoint_and_goes_on(tmp_path):
    (tmp_path / "00000009").write_text("a person's")
    (tmp_path / "notes").write_text("a person's")
    run_processes(resumes_before, 1, str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == ["00000002", "00000003", "00000009", "notes", OWNER]


def test_a_save_that_is_under_way_can_be_told_from_a_checkpoint_without_its_manifest(tmp_path):
    looks = [look for seen in run_processes(interrupted_save, 2, str(tmp_path)) for look in seen]
    assert {found for _, found in looks} == {UNFINISHED}
    assert any(all(name.startswith(BEGUN) for name in names) for names, _ in looks)  # the first worker's mark
    layers = {f"layer-{layer:04d}.safetensors" for layer in range(LAYERS)}
    assert layers <= {without_save_id(name) for names, _ in looks for name in names}
    assert not list(tmp_path.glob("*/begun-*"))


def interrupted_save(rank, world, rendezvous, folder):
    """Returns what this worker saw of a save: after its mark and after each of its layers, before its share."""
    disk = Watched(folder)
    one = Counting(rank, world, rendezvous, disk)
    one.become(1)
    one.saver.save(1, 0)
    one.saver.wait()
    return disk.seen


class Watched(Storage):
    """A folder that is looked at as soon as a mark or a layer is there. Behind a share the manifest may come at any
    time."""

    def __init__(self, location):
        super().__init__(location)
        self.seen = []

    def write(self, path, data):
        super().write(path, data)
        name = path.rpartition("/")[2]
        if name.startswith((BEGUN, "layer-")):
            names = self.names(path.partition("/")[0])
            seen_by_others = Storage(self.location)
            self.seen += [(names, examine(seen_by_others, folder)) for folder in folders_of(seen_by_others)]
