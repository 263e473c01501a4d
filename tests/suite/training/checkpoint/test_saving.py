"""Saving beside the training: what is saved, what a failure does, and what a kill leaves."""

import os
import resource
import threading
import time
from collections import Counter
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch.distributed as dist

from launch.backends.processes import run_processes
from suite.errors import CheckpointError
from suite.training.checkpoint import Readers, Storage, load_optimizer, load_values, newest_valid, reading
from suite.training.checkpoint.ownership import OWNER
from suite.training.checkpoint.reading import UNFINISHED, examine, folders_of
from suite.training.checkpoint.storage import BEGUN
from tests.suite.training.checkpoint.saves import (
    LAYERS,
    Counting,
    kill_during_saves,
    layer_path,
    limit,
    newest_of,
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
    one.save(1, 2)
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
    one.save(1, 2)
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


def fails(rank, world, rendezvous, folder):
    """Three saves that cannot be written by one of the workers, one that can, and then no more."""
    said = []
    one = Counting(rank, world, rendezvous, folder, log=said.append)
    seen = []
    for step in range(1, 9):
        if rank == 1:
            limit(resource.RLIM_INFINITY if step in (1, 4) else 300)
        try:
            one.save(step)
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
    one.save(1, 2, 3)
    one.saver.finish(3, 0)
    one.become(9)
    found = newest_of(place)
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


def test_kills_during_saves_leave_the_state_before_or_the_new_one(tmp_path):
    assert sum(kill_during_saves(str(tmp_path), 3, seed=1)) == 3


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
    Counting(rank, world, rendezvous, disk).save(1)
    return disk.seen


class Watched(Storage):
    """A folder that is looked at as soon as a mark or a layer is there. The manifest may come right after a share."""

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
