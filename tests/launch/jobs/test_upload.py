"""Copies of a job's runs to a URL."""

import os
import tempfile
from pathlib import Path

import pytest

from launch.jobs.upload import CopyError, UploadThread


def test_a_file_is_copied_again_only_if_it_changed(tmp_path):
    run, notes = tmp_path / "runs" / "t" / "1", tmp_path / "notes"
    copies = UploadThread(tmp_path / "runs", notes, f"file://{tmp_path}/there")
    assert copies.copy() == 0
    (run / "checkpoints").mkdir(parents=True)
    (run / "logs").mkdir()
    for name in ("record.json", "logs/a.log", "checkpoints/weights"):
        (run / name).write_text("one")
    notes.write_text(f"{run}\n{run}\n")
    assert [copies.copy(), copies.copy()] == [2, 0]
    (run / "logs" / "a.log").write_text("one, two")
    assert copies.copy() == 1
    there = tmp_path / "there" / "runs" / "t" / "1"
    assert {str(path.relative_to(there)): path.read_text() for path in there.rglob("*") if path.is_file()} == {
        "record.json": "one", "logs/a.log": "one, two",
    }  # fmt: skip


@pytest.fixture
def as_nobody(tmp_path):
    """Runs the test without root's permissions, in a folder that it may write."""
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.geteuid() and folder != Path(tempfile.gettempdir()):
            folder.chmod(folder.stat().st_mode | 0o055)
        if folder == Path(tempfile.gettempdir()):
            break
    if os.geteuid() == 0:
        os.chown(tmp_path, 65534, -1)
        os.seteuid(65534)
        yield
        os.seteuid(0)
    else:
        yield


def test_an_unreadable_file_does_not_prevent_the_copy_of_others(tmp_path, as_nobody):
    run, notes, there = tmp_path / "runs/t/1", tmp_path / "notes", tmp_path / "there/runs/t/1"
    run.mkdir(parents=True)
    notes.write_text(f"{run}\n")
    for name in ("a.log", "b.log", "c.log"):
        (run / name).write_text(name)
    (run / "a.log").chmod(0)
    copies = UploadThread(tmp_path / "runs", notes, f"file://{tmp_path}/there")
    for _ in range(2):
        with pytest.raises(CopyError, match=r"1 of its files cannot be read: .*a\.log.*; all others are copied"):
            copies.copy()
        assert sorted(path.name for path in there.iterdir()) == ["b.log", "c.log"]
    (run / "a.log").chmod(0o600)
    assert copies.copy() == 1


def refusing_store(tmp_path, names, refused):
    """Returns the copies of a run with these files, and their folder, which refuses some names."""
    run, notes, there = tmp_path / "runs/t/1", tmp_path / "notes", tmp_path / "there/runs/t/1"
    run.mkdir(parents=True)
    notes.write_text(f"{run}\n")
    for name in names:
        (run / name).write_text(name)
    for name in refused:
        (there / name).mkdir(parents=True)
    return UploadThread(tmp_path / "runs", notes, f"file://{tmp_path}/there"), there


def test_refused_files_do_not_prevent_the_copy_of_others(tmp_path):
    copies, there = refusing_store(tmp_path, "abcde", "bd")
    for _ in range(2):
        with pytest.raises(CopyError, match=r"refused 2 of its files: .*/b: .*; all others are copied"):
            copies.copy()
        assert [(there / name).is_file() for name in "abcde"] == [True, False, True, False, True]
    for name in "bd":
        (there / name).rmdir()
    assert copies.copy() == 2


def test_three_refusals_in_a_row_end_a_copy_and_refused_files_go_last(tmp_path):
    copies, there = refusing_store(tmp_path, "abcdef", "abce")
    with pytest.raises(CopyError, match=r"refused 3 of its files: .*/a: .*; the rest waits for the next copy"):
        copies.copy()
    assert not (there / "d").exists()
    with pytest.raises(CopyError, match=r"refused 4 of its files: .*/e: "):
        copies.copy()
    assert (there / "d").is_file()
    assert (there / "f").is_file()
