"""Prepared data sent to a node: whole or not at all, in bounded memory, within a time that follows from its size."""

import os
import resource
import time

import pytest
import ray

from launch.storage_sync import data_transfer
from launch.storage_sync.data_transfer import FolderReceiver, send_folder
from suite.errors import WorkerError
from suite.pipeline.planning.placement import Node

LARGE = 400_000_000
NODE = Node("one", "one", 1, 1)


@pytest.fixture(scope="module", autouse=True)
def cluster():
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=100_000_000)
    yield
    ray.shutdown()


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "data"
    (folder / "train").mkdir(parents=True)
    (folder / "text.json").write_text("{}")
    (folder / "empty").touch()
    (folder / "train" / "a.arrow").write_bytes(os.urandom(20_000_000))
    return folder


def receiver(folder):
    return ray.remote(FolderReceiver).options(num_cpus=0).remote(str(folder))


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def peak_bytes(_):
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_a_folder_arrives_whole_at_each_node_that_lacks_it(source, tmp_path):
    (tmp_path / "c" / "data").mkdir(parents=True)
    (tmp_path / "c" / "data" / "kept").touch()
    targets = [tmp_path / name / "data" for name in "abc"]
    send_folder(source, {receiver(target): NODE for target in targets})
    assert contents(targets[0]) == contents(targets[1]) == contents(source)
    assert contents(targets[2]) == {"kept": b""}
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["data"]


def test_hundreds_of_megabytes_take_a_few_chunks_of_memory(source, tmp_path):
    target, one = tmp_path / "there" / "data", receiver(tmp_path / "there" / "data")
    small = receiver(tmp_path / "small" / "data")
    send_folder(source, {small: NODE})
    before = [peak_bytes(None), ray.get(small.__ray_call__.remote(peak_bytes))]
    with (source / "train" / "b.arrow").open("wb") as file:
        file.truncate(LARGE)
    send_folder(source, {one: NODE})
    assert (target / "train" / "b.arrow").stat().st_size == LARGE
    after = [peak_bytes(None), ray.get(one.__ray_call__.remote(peak_bytes))]
    # the object store's 100 MB count as memory of whoever reads it
    assert [late - early < LARGE / 2 for early, late in zip(before, after, strict=True)] == [True, True], (
        before,
        after,
    )


def test_a_node_that_cannot_take_it_is_named_and_nothing_stays(source, tmp_path):
    (tmp_path / "there").write_text("a file where the folder would be")
    with pytest.raises(WorkerError, match=r"node one could not receive the prepared data .*GPIPE_STORAGE"):
        send_folder(source, {receiver(tmp_path / "there" / "data"): NODE})


class Slow(FolderReceiver):
    def append(self, name, data):
        time.sleep(2)
        super().append(name, data)


def test_a_transfer_that_is_too_slow_ends(source, tmp_path, monkeypatch):
    monkeypatch.setattr(data_transfer, "START_S", 5.0)
    slow = ray.remote(Slow).options(num_cpus=0).remote(str(tmp_path / "there" / "data"))
    ray.get(slow.has_folder.remote())
    begin = time.monotonic()
    with pytest.raises(WorkerError, match="slower than 10 MB/s"):
        send_folder(source, {slow: NODE})
    assert time.monotonic() - begin < 30
    assert not list((tmp_path / "there").glob("*"))
