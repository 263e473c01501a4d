"""A node that does not see a run's folder is refused, with the node and the folder."""

import threading
from functools import partial

import pytest

from launch import node_probe
from launch.backends import shared_folder
from launch.backends.shared_folder import check_shared, unseen_folders
from suite.errors import PlacementError
from suite.pipeline.planning.placement import Node

HEAD, A, B = (Node(name, f"{name} (10.0.0.1)", 1, 1) for name in ("head", "a", "b"))


def test_a_marker_that_a_network_file_system_shows_late_is_waited_for(tmp_path):
    writing = threading.Timer(0.5, partial(node_probe.write_marker, str(tmp_path), "mark"))
    writing.start()
    assert unseen_folders([str(tmp_path)], "mark", tmp_path) == []
    writing.join()


def test_a_folder_of_the_same_path_with_another_marker_or_none_is_not_shared(tmp_path, monkeypatch):
    monkeypatch.setattr(node_probe, "SETTLE_S", 0.05)
    assert unseen_folders([str(tmp_path)], "mark", tmp_path / "data") == [str(tmp_path), str(tmp_path / "data")]
    (tmp_path / "mark").write_text("another")
    assert unseen_folders([str(tmp_path)], "mark", tmp_path) == [str(tmp_path)]


@pytest.fixture
def asked(monkeypatch):
    """The nodes that were asked, by their names; b has disks of its own."""
    names = []
    monkeypatch.setattr(node_probe, "SETTLE_S", 0.0)
    monkeypatch.setattr(shared_folder, "own_node", lambda: "head")

    def run_on_all(nodes, task, places, marker, data, **_):
        names.extend(node.id for node in nodes)
        return {node: task(places, "other" if node == B else marker, data) for node in nodes}

    monkeypatch.setattr(shared_folder, "run_on_all", run_on_all)
    return names


def test_nodes_that_see_the_folders_are_asked_once_and_no_marker_stays(asked, tmp_path):
    folders = [tmp_path / "run", tmp_path / "checkpoints"]
    check_shared([HEAD, A, A, HEAD], folders, tmp_path)
    check_shared([HEAD], folders, tmp_path)
    assert asked == ["a"]
    assert [list(folder.iterdir()) for folder in folders] == [[], []]


def test_a_node_with_a_disk_of_its_own_is_named_with_the_folder(asked, tmp_path):
    with pytest.raises(PlacementError, match=rf"^node b .* does not see the folder {tmp_path}/run of .*; mount it"):
        check_shared([HEAD, A, B], [tmp_path / "run"], tmp_path)
    assert list((tmp_path / "run").iterdir()) == []
    with pytest.raises(PlacementError, match=f"does not see the folder {tmp_path}/data of"):
        check_shared([HEAD, A], [], tmp_path / "data")
