"""Whether a node shares the run's folder is checked with a timeout, and a wrong answer does no harm."""

import threading
import time
from types import SimpleNamespace

import pytest
import ray

from launch import node_probe
from launch.storage_sync import unshared_nodes
from launch.storage_sync.folder_delta import MARKER, FolderDelta, apply_delta
from launch.storage_sync.unshared_nodes import prepare_nodes, receive_run
from suite.errors import PlacementError
from suite.pipeline.planning.placement import Node

HEAD, A, B = (Node(name, name, 1, 1) for name in ("head", "a", "b"))


def all_files(folder):
    return FolderDelta(folder, from_now=False).take()


def test_a_marker_that_a_network_file_system_shows_late_is_waited_for(tmp_path):
    writing = threading.Timer(0.5, (tmp_path / MARKER).write_text, ["mark"])
    writing.start()
    assert not node_probe.unseen_markers(str(tmp_path), [MARKER], 10.0, "mark")
    writing.join()


def test_a_folder_without_the_marker_or_with_another_runs_is_not_shared(tmp_path):
    begun = time.monotonic()
    assert node_probe.unseen_markers(str(tmp_path), [MARKER], 0.3, "mark")
    (tmp_path / MARKER).write_text("older")
    assert node_probe.unseen_markers(str(tmp_path), [MARKER], 0.0, "mark")
    assert time.monotonic() - begun >= 0.3


def test_a_shared_folder_that_was_not_recognized_gets_no_line_twice(tmp_path):
    """On a file system that shows the marker only after the first check."""
    (tmp_path / "messages.log").write_text("begun\n")
    (tmp_path / "experiment.draft").write_text("draft")
    run = all_files(tmp_path)
    (tmp_path / "messages.log").write_text("begun\nsaid since\n")
    (tmp_path / MARKER).write_text("mark")
    changes = receive_run(tmp_path, run, "mark")
    for _ in range(5):
        for delta in changes.take():
            apply_delta(tmp_path, delta)
        with (tmp_path / "messages.log").open("a") as file:
            file.write("more\n")
    assert changes.take() == []
    assert (tmp_path / "messages.log").read_text() == "begun\nsaid since\n" + 5 * "more\n"
    assert (tmp_path / "experiment.draft").read_text() == "draft"


def test_the_marker_is_not_copied_and_an_earlier_attempts_draft_is_removed(tmp_path):
    run, there = tmp_path / "run", tmp_path / "there"
    run.mkdir()
    (run / MARKER).write_text("mark")
    (run / "plan.txt").write_text("plan")
    there.mkdir()
    (there / "experiment.draft").touch()
    changes = receive_run(there, all_files(run), "mark")
    assert [path.name for path in there.iterdir()] == ["plan.txt"]
    (there / "messages.log").write_text("said\n")
    assert [delta.path for delta in changes.take()] == ["messages.log"]


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """The nodes that each task was run on, and the folders that nodes a and b do not share."""
    made = SimpleNamespace(tasks=[], unshared=[tmp_path / "run"], said=[], known=set())

    def run_on_all(nodes, task, folder, *args, **_):
        made.tasks.append((task.__name__, [node.name for node in nodes]))
        if task is receive_run:
            return dict.fromkeys(nodes, "folder")
        return dict.fromkeys(nodes, [MARKER] if str(folder) in map(str, made.unshared) else [])

    monkeypatch.setattr(ray, "put", list)
    monkeypatch.setattr(unshared_nodes, "own_node", lambda: "head")
    monkeypatch.setattr(unshared_nodes, "run_on_all", run_on_all)
    monkeypatch.setattr(unshared_nodes, "send_folder", lambda data, nodes: made.tasks.append((data, len(nodes))))
    attempt = SimpleNamespace(folder=tmp_path / "run", data="data", owner="mark")
    made.prepare = lambda nodes, checkpoints: prepare_nodes(attempt, nodes, checkpoints, made.known, made.said.append)
    return made


def test_nodes_that_do_not_share_the_folder_get_it_and_are_asked_once(cluster):
    assert cluster.prepare([HEAD, A, A, HEAD], "s3://bucket") == {"a": "folder"}
    assert cluster.tasks == [("unseen_markers", ["a"]), ("data", 1), ("receive_run", ["a"])]
    assert cluster.said == ["a: the run's folder is not shared, its files are copied; checkpoints go to s3://bucket"]
    cluster.tasks.clear()
    assert cluster.prepare([HEAD, A, B], "s3://bucket") == {"a": "folder", "b": "folder"}
    assert cluster.tasks == [("unseen_markers", ["b"]), ("data", 2), ("receive_run", ["a", "b"])]


def test_nodes_that_share_the_folder_get_nothing(cluster, tmp_path):
    cluster.unshared.clear()
    assert cluster.prepare([HEAD, A], str(tmp_path / "checkpoints")) == {}
    assert cluster.prepare([HEAD], str(tmp_path / "checkpoints")) == {}
    assert cluster.tasks == [("unseen_markers", ["a"])]
    assert cluster.said == []


def test_checkpoints_that_are_not_shared_either_are_refused_by_node(cluster, tmp_path):
    checkpoints = tmp_path / "checkpoints"
    assert cluster.prepare([HEAD, A], f"file://{checkpoints}") == {"a": "folder"}
    cluster.unshared.append(checkpoints)
    with pytest.raises(PlacementError, match=r"1 nodes do not share the run's folder .*: b; 1 of them do not"):
        cluster.prepare([HEAD, B], str(checkpoints))
    assert list(checkpoints.iterdir()) == []
