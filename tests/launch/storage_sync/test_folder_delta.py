"""A folder to which another one's deltas are applied stays equal to it, whatever changes."""

import os

from hypothesis import given
from hypothesis import strategies as st

from launch.storage_sync import folder_delta
from launch.storage_sync.folder_delta import MARKER, FolderDelta, apply_delta

NAMES = ("metrics.jsonl", "logs/a.log", "gpu/0-0.json", "experiment.toml", "wandb/run/x.wandb")
ACTIONS = st.tuples(st.sampled_from(NAMES), st.sampled_from(["add", "cut", "anew", "none"]), st.binary(max_size=200))


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder_delta.files_of(folder)}


def copy(first, second):
    for delta in FolderDelta(first, from_now=False).take():
        apply_delta(second, delta)


def act(path, what, data):
    path.parent.mkdir(parents=True, exist_ok=True)
    if what == "add":
        with path.open("ab") as file:
            file.write(data)
    elif what == "cut" and path.exists():
        os.truncate(path, path.stat().st_size // 2)
    elif what == "anew":
        path.write_bytes(data)


@given(st.lists(st.lists(ACTIONS, max_size=4), max_size=6))
def test_a_folder_kept_up_to_date_by_deltas_is_equal(tmp_path_factory, rounds):
    first, second = tmp_path_factory.mktemp("first"), tmp_path_factory.mktemp("second")
    (first / "metrics.jsonl").write_bytes(b"before\n")
    copy(first, second)
    changes = FolderDelta(first)
    clock = 1
    for actions in rounds:
        for name, what, data in actions:
            act(first / name, what, data)
        for path in folder_delta.files_of(first):  # clocks of files are coarse
            clock += 1
            os.utime(path, ns=(clock, clock))
        for delta in changes.take():
            apply_delta(second, delta)
        assert contents(second) == contents(first)


def test_of_growing_files_only_the_new_part_is_sent(tmp_path, monkeypatch):
    log = tmp_path / "logs" / "stage-0-0.log"
    log.parent.mkdir()
    log.write_bytes(b"x" * 100)
    changes = FolderDelta(tmp_path)
    assert changes.take() == []
    with log.open("ab") as file:
        file.write(b"new")
    (delta,) = changes.take()
    assert (delta.at, delta.data) == (100, b"new")
    monkeypatch.setattr(folder_delta, "MAX_BYTES", 4)
    with log.open("ab") as file:
        file.write(b"0123456789")
    assert [changes.take()[0].data for _ in range(3)] == [b"0123", b"4567", b"89"]
    assert changes.take() == []


def test_messages_of_all_nodes_are_appended_and_none_is_overwritten(tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
        (folder / "messages.log").write_text("both\n")
    changes = FolderDelta(there)
    with (here / "messages.log").open("a") as file:
        file.write("said here\n")
    with (there / "messages.log").open("a") as file:
        file.write("said there\n")
    for delta in changes.take():
        apply_delta(here, delta)
    assert (here / "messages.log").read_text() == "both\nsaid here\nsaid there\n"


def test_checkpoints_the_drivers_heartbeats_and_the_lock_are_not_copied(tmp_path):
    excluded = ("checkpoints/5/manifest.json", "heartbeats.json", "lock", "huggingface.lock", "ray-train/1/x")
    for name in (*excluded, "plan.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    assert list(contents(tmp_path)) == ["plan.txt"]
    (tmp_path / "copy").mkdir()
    copy(tmp_path, tmp_path / "copy")
    assert [path.name for path in (tmp_path / "copy").iterdir()] == ["plan.txt"]


def vanishing(folder):
    raise FileNotFoundError(folder)


def test_a_folder_that_vanishes_while_it_is_listed_ends_nothing(tmp_path, monkeypatch):
    changes = FolderDelta(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("one\n")
    with monkeypatch.context() as patch:
        patch.setattr(folder_delta, "files_of", vanishing)
        assert changes.take() == []
    assert [delta.path for delta in changes.take()] == ["metrics.jsonl"]


def test_a_folder_that_was_found_to_be_shared_once_sends_nothing_any_more(tmp_path):
    (tmp_path / MARKER).write_text("mark")
    (tmp_path / "metrics.jsonl").write_text("one\n")
    changes = FolderDelta(tmp_path, mark="mark")
    (tmp_path / MARKER).unlink()  # as at the end of a session, or for a moment on a network file system
    assert changes.take() == []
