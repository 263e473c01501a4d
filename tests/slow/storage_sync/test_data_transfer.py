"""Prepared data sent to a node: whole or not at all, in bounded memory, within a time that follows from its size."""

import os
import resource
import time

import pytest
import ray

from launch import ray_nodes
from launch.storage_sync import data_transfer
from launch.storage_sync.data_transfer import ChunkReader, receive_folder, send_folder
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


@pytest.fixture
def send(monkeypatch, source):
    """Returns a function that sends the source to a folder, as if that were its place on another node."""

    def send(target):
        def start_on(node, task, folder, *args, **options):
            if task is receive_folder:
                folder = target
            return ray.remote(task).options(**{"num_cpus": 0} | options).remote(folder, *args)

        monkeypatch.setattr(data_transfer, "start_on", start_on)
        monkeypatch.setattr(ray_nodes, "start_on", start_on)
        send_folder(source, [NODE])

    return send


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_folder_arrives_whole_at_each_node_that_lacks_it(source, send, tmp_path):
    (tmp_path / "c" / "data").mkdir(parents=True)
    (tmp_path / "c" / "data" / "kept").touch()
    targets = [tmp_path / name / "data" for name in "abc"]
    for target in targets:
        send(target)
    assert contents(targets[0]) == contents(targets[1]) == contents(source)
    assert contents(targets[2]) == {"kept": b""}
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["data"]


def peak_bytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Reader(ChunkReader):
    def peak(self):
        return peak_bytes()


class Receiver:
    def receive(self, folder, sizes, reader):
        receive_folder(folder, sizes, reader)
        return peak_bytes()


def test_hundreds_of_megabytes_take_a_few_chunks_of_memory(source, tmp_path):
    reader, receiver = (ray.remote(actor).options(num_cpus=0) for actor in (Reader, Receiver))
    reader, receiver = reader.remote(source), receiver.remote()

    def peaks(target):
        sizes = {str(path.relative_to(source)): path.stat().st_size for path in source.rglob("*") if path.is_file()}
        return ray.get(receiver.receive.remote(target, sizes, reader)), ray.get(reader.peak.remote())

    before, target = peaks(tmp_path / "small"), tmp_path / "large"
    with (source / "train" / "b.arrow").open("wb") as file:
        file.truncate(LARGE)
    after = peaks(target)
    assert (target / "train" / "b.arrow").stat().st_size == LARGE
    # the object store's 100 MB count as memory of whoever reads it
    assert [late - early < LARGE / 2 for early, late in zip(before, after, strict=True)] == [True, True], (
        before,
        after,
    )


def test_a_node_that_cannot_take_it_is_named_and_nothing_stays(send, tmp_path):
    (tmp_path / "there").write_text("a file where the folder would be")
    with pytest.raises(WorkerError, match=r"node one could not receive the prepared data .*GPIPE_STORAGE"):
        send(tmp_path / "there" / "data")


class Slow(ChunkReader):
    def read(self, name, offset):
        time.sleep(2)
        return super().read(name, offset)


def test_a_transfer_that_is_too_slow_ends(send, tmp_path, monkeypatch):
    monkeypatch.setattr(data_transfer, "START_S", 5.0)
    monkeypatch.setattr(data_transfer, "ChunkReader", Slow)
    begin = time.monotonic()
    with pytest.raises(WorkerError, match="slower than 10 MB/s"):
        send(tmp_path / "there" / "data")
    assert time.monotonic() - begin < 30
    assert not list((tmp_path / "there").glob("*"))
