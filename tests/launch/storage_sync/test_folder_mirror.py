"""Whether a node shares the run's folder is checked with a timeout, and a wrong answer does no harm."""

import threading
import time

import pytest
import ray

from launch.storage_sync import folder_mirror
from launch.storage_sync.folder_delta import END, MARKER, FileDelta, FolderDelta, apply_delta
from launch.storage_sync.folder_mirror import FolderMirror, MirrorActor
from suite.pipeline.planning.placement import Node


def test_a_marker_that_a_network_file_system_shows_late_is_waited_for(tmp_path):
    actor = MirrorActor(str(tmp_path), "mark")
    writing = threading.Timer(0.5, (tmp_path / MARKER).write_text, ["mark"])
    writing.start()
    assert actor.shares(str(tmp_path), 10.0)
    writing.join()


def test_a_folder_without_the_marker_or_with_another_runs_is_not_shared(tmp_path):
    begun = time.monotonic()
    assert not MirrorActor(str(tmp_path), "mark").shares(str(tmp_path), 0.3)
    (tmp_path / MARKER).write_text("older")
    assert not MirrorActor(str(tmp_path), "mark").shares(str(tmp_path), 0.0)
    assert time.monotonic() - begun >= 0.3


def test_a_shared_folder_that_was_not_recognized_gets_no_line_twice(tmp_path):
    """On a file system that shows the marker only after the first check."""
    (tmp_path / "messages.log").write_text("begun\n")
    (tmp_path / "experiment.draft").write_text("draft")
    actor = MirrorActor(str(tmp_path), "mark")
    run = list(FolderDelta(tmp_path, from_now=False).take())
    (tmp_path / "messages.log").write_text("begun\nsaid since\n")
    (tmp_path / MARKER).write_text("mark")
    actor.receive(run)
    for _ in range(5):
        for delta in actor.changes() or ():
            apply_delta(tmp_path, delta)
        with (tmp_path / "messages.log").open("a") as file:
            file.write("more\n")
    assert actor.changes() is None
    assert (tmp_path / "messages.log").read_text() == "begun\nsaid since\n" + 5 * "more\n"
    assert (tmp_path / "experiment.draft").read_text() == "draft"


def test_the_marker_is_not_copied(tmp_path):
    run, there = tmp_path / "run", tmp_path / "there"
    run.mkdir()
    (run / MARKER).write_text("mark")
    (run / "plan.txt").write_text("plan")
    actor = MirrorActor(str(there), "mark")
    actor.receive(list(FolderDelta(run, from_now=False).take()))
    assert [path.name for path in there.iterdir()] == ["plan.txt"]
    (there / "messages.log").write_text("said\n")
    assert [delta.path for delta in actor.changes()] == ["messages.log"]


class FakeActor:
    """A node's mirror actor: each call returns or raises the next answer; after the last one there are no changes."""

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
    """Returns a function that runs a mirror on the answers of nodes a and b; it returns the mirror and its log."""

    def get(result, timeout):
        if isinstance(result.value, Exception):
            raise result.value
        return result.value

    def wait(results, num_returns, timeout):
        return results, []

    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "wait", wait)
    monkeypatch.setattr(folder_mirror, "PERIOD", 0.01)

    def carried(a, b):
        said = []
        made = FolderMirror(tmp_path, tmp_path, [], "s3://bucket", set(), said.append)
        assert made.complete
        made._actors = {a: Node("1", "a", 1, 1), b: Node("2", "b", 1, 1)}
        made._thread.start()
        until = time.monotonic() + 10
        while made._thread.is_alive() and (a.answers or b.answers) and time.monotonic() < until:
            time.sleep(0.01)
        made.end()
        return made, said

    return carried


ADDED = [FileDelta("messages.log", END, b"said", False)]


@pytest.mark.parametrize(
    ("lost", "why"),
    [
        (ray.exceptions.ActorDiedError(), "The actor died"),
        (ValueError("not a pickle\nat all"), "not a pickle"),
        (RuntimeError(), "RuntimeError"),
        ([FileDelta("../out", 0, b"", True)], "it sent a file that it must not write"),
    ],
)
def test_a_node_whose_files_are_no_longer_copied_is_reported_once_and_others_continue(carry, tmp_path, lost, why):
    made, said = carry(FakeActor(lost), FakeActor([], [], [], ADDED))
    assert not made.complete
    assert len(said) == 1
    assert said[0].startswith(f"a: its files are no longer copied to the run's folder: {why}")
    assert (tmp_path / "messages.log").read_text() == "said"


def test_a_node_that_shares_the_folder_after_all_is_not_lost(carry):
    made, said = carry(FakeActor(None), FakeActor(None))
    assert made.complete
    assert not made._thread.is_alive()
    assert [line.split(":")[0] for line in said] == [f"{node} shares the run's folder after all" for node in "ab"]


def test_a_thread_that_ends_by_itself_loses_all_nodes(carry, monkeypatch):
    def wait(results, num_returns, timeout):
        raise SystemError("Ray is gone")

    monkeypatch.setattr(ray, "wait", wait)
    made, said = carry(FakeActor(), FakeActor([], []))
    assert not made.complete
    assert said == [f"{node}: its files are no longer copied to the run's folder: Ray is gone" for node in "ab"]


def test_the_last_copy_reports_a_lost_node_once(carry, monkeypatch):
    monkeypatch.setattr(folder_mirror, "PERIOD", 60.0)
    made, said = carry(FakeActor(ValueError("gone")), FakeActor())
    assert not made.complete
    assert len(said) == 1
