"""Whether a node shares the run's folder is found out with patience, and a wrong answer does no harm."""

import threading
import time

import pytest
import ray

from launch.cluster import mirror
from launch.cluster.mirror import Mirror, Outpost
from launch.cluster.parcels import END, MARKER, Piece, packed, put
from suite.pipeline.placement import Node


def test_a_marker_that_a_network_file_system_shows_late_is_waited_for(tmp_path):
    post = Outpost(str(tmp_path), "mark")
    writing = threading.Timer(0.5, (tmp_path / MARKER).write_text, ["mark"])
    writing.start()
    assert post.shares(str(tmp_path), 10.0)
    writing.join()


def test_a_folder_without_the_marker_or_with_another_runs_is_not_shared(tmp_path):
    begun = time.monotonic()
    assert not Outpost(str(tmp_path), "mark").shares(str(tmp_path), 0.3)
    (tmp_path / MARKER).write_text("older")
    assert not Outpost(str(tmp_path), "mark").shares(str(tmp_path), 0.0)
    assert time.monotonic() - begun >= 0.3


def test_a_shared_folder_that_was_taken_for_another_gets_nothing_twice(tmp_path):
    """As on a file system that shows the marker only after the first look."""
    (tmp_path / "messages.log").write_text("begun\n")
    (tmp_path / "experiment.draft").write_text("draft")
    post = Outpost(str(tmp_path), "mark")
    run = packed(tmp_path)
    (tmp_path / "messages.log").write_text("begun\nsaid since\n")
    (tmp_path / MARKER).write_text("mark")
    post.receive(run)
    for _ in range(5):
        for piece in post.changes() or ():
            put(tmp_path, piece)
        with (tmp_path / "messages.log").open("a") as file:
            file.write("more\n")
    assert post.changes() is None
    assert (tmp_path / "messages.log").read_text() == "begun\nsaid since\n" + 5 * "more\n"
    assert (tmp_path / "experiment.draft").read_text() == "draft"


def test_the_marker_is_not_carried(tmp_path):
    run, there = tmp_path / "run", tmp_path / "there"
    run.mkdir()
    (run / MARKER).write_text("mark")
    (run / "plan.txt").write_text("plan")
    post = Outpost(str(there), "mark")
    post.receive(packed(run))
    assert [path.name for path in there.iterdir()] == ["plan.txt"]
    (there / "messages.log").write_text("said\n")
    assert [piece.path for piece in post.changes()] == ["messages.log"]


class Post:
    """A node's outpost: each call gives the next answer, or raises it; after the last there is nothing new."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.changes = self

    def remote(self):
        return Answer(self.answers.pop(0) if self.answers else [])


class Answer:
    def __init__(self, value):
        self.value = value


@pytest.fixture
def carry(tmp_path, monkeypatch):
    """Returns a mirror that has carried the answers of two nodes, a and b, to the last, and what it said."""

    def get(result, timeout):
        if isinstance(result.value, Exception):
            raise result.value
        return result.value

    def wait(results, num_returns, timeout):
        return results, []

    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "wait", wait)
    monkeypatch.setattr(mirror, "PERIOD", 0.01)

    def carried(a, b):
        said = []
        made = Mirror(tmp_path, tmp_path, [], "s3://bucket", set(), said.append)
        assert made.whole
        made._posts = {a: Node("1", "a", 1, 1), b: Node("2", "b", 1, 1)}
        made._thread.start()
        until = time.monotonic() + 10
        while made._thread.is_alive() and (a.answers or b.answers) and time.monotonic() < until:
            time.sleep(0.01)
        made.end()
        return made, said

    return carried


ADDED = [Piece("messages.log", END, b"said", False)]


@pytest.mark.parametrize(
    ("lost", "why"),
    [
        (ray.exceptions.ActorDiedError(), "The actor died"),
        (ValueError("not a pickle\nat all"), "not a pickle"),
        (RuntimeError(), "RuntimeError"),
        ([Piece("../out", 0, b"", True)], "it sent a file that it must not write"),
    ],
)
def test_a_node_whose_files_are_no_longer_carried_is_named_once_and_others_go_on(carry, tmp_path, lost, why):
    made, said = carry(Post(lost), Post([], [], [], ADDED))
    assert not made.whole
    assert len(said) == 1
    assert said[0].startswith(f"a: its files are no longer carried to the run's folder: {why}")
    assert (tmp_path / "messages.log").read_text() == "said"


def test_a_node_that_shares_the_folder_after_all_is_not_lost(carry):
    made, said = carry(Post(None), Post(None))
    assert made.whole
    assert not made._thread.is_alive()
    assert [line.split(":")[0] for line in said] == [f"{node} shares the run's folder after all" for node in "ab"]


def test_a_thread_that_ends_by_itself_loses_all_nodes(carry, monkeypatch):
    def wait(results, num_returns, timeout):
        raise SystemError("Ray is gone")

    monkeypatch.setattr(ray, "wait", wait)
    made, said = carry(Post(), Post([], []))
    assert not made.whole
    assert said == [f"{node}: its files are no longer carried to the run's folder: Ray is gone" for node in "ab"]


def test_the_last_round_tells_a_node_once(carry, monkeypatch):
    monkeypatch.setattr(mirror, "PERIOD", 60.0)
    made, said = carry(Post(ValueError("gone")), Post())
    assert not made.whole
    assert len(said) == 1
