"""Copies of a job's runs to a URL."""

import os
import tempfile
import time
from pathlib import Path

import pytest
from fsspec.implementations.local import LocalFileSystem

from launch.jobs import in_job_upload
from launch.jobs.in_job_upload import CopyError, RunCopies, restore
from launch.runs.store import COPIES


def test_a_file_is_copied_again_only_if_it_changed(tmp_path):
    run, notes = tmp_path / "runs" / "t" / "1", tmp_path / "notes"
    copies = RunCopies(tmp_path / "runs", notes, f"file://{tmp_path}/there")
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
    copies = RunCopies(tmp_path / "runs", notes, f"file://{tmp_path}/there")
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
    return RunCopies(tmp_path / "runs", notes, f"file://{tmp_path}/there"), there


def test_refused_files_do_not_prevent_the_copy_of_others(tmp_path):
    copies, there = refusing_store(tmp_path, "abcde", "bd")
    for _ in range(2):
        with pytest.raises(CopyError, match=r"refused 2 of its files: .*/b: .*; all others are copied"):
            copies.copy()
        assert [(there / name).is_file() for name in "abcde"] == [True, False, True, False, True]
    for name in "bd":
        (there / name).rmdir()
    assert copies.copy() == 2


def test_three_refusals_in_a_row_end_a_copy_and_refused_files_go_last(tmp_path, monkeypatch):
    monkeypatch.setattr(in_job_upload, "AT_ONCE", 1)
    copies, there = refusing_store(tmp_path, "abcdef", "abce")
    with pytest.raises(CopyError, match=r"refused 3 of its files: .*/a: .*; the rest waits for the next copy"):
        copies.copy()
    assert not (there / "d").exists()
    with pytest.raises(CopyError, match=r"refused 4 of its files: .*/e: "):
        copies.copy()
    assert (there / "d").is_file()
    assert (there / "f").is_file()


class CountedStore(LocalFileSystem):
    """Counts the files that are put, and answers as late as a store on the network."""

    protocol = "counted"
    cachable = False
    puts = 0

    def put_file(self, path1, path2, **options):
        CountedStore.puts += 1
        time.sleep(0.005)
        super().put_file(path1, path2, **options)


@pytest.mark.slow
def test_a_copy_of_a_run_of_1024_workers_takes_few_requests_a_minute(tmp_path, monkeypatch):
    """Each minute the files of the run itself, every ten minutes those of each worker, 16 at once."""
    run, notes = tmp_path / "runs/t/1", tmp_path / "notes"
    notes.write_text(f"{run}\n")

    def work():
        for name in ("metrics.jsonl", "messages.log", "attempts.jsonl"):
            with (run / name).open("a") as file:
                file.write("line\n")
        for worker in range(1024):
            for name in (f"system/0-{worker}.jsonl", f"logs/stage-0-{worker}.log"):
                with (run / name).open("a") as file:
                    file.write("line\n")

    for folder in ("system", "logs"):
        (run / folder).mkdir(parents=True)
    monkeypatch.setattr(CountedStore, "puts", 0)
    monkeypatch.setattr(in_job_upload, "open_store", lambda url: (CountedStore(), str(tmp_path / "there")))
    copies, counts = RunCopies(tmp_path / "runs", notes, "counted://there"), []
    for minute in range(11):
        monkeypatch.setattr(in_job_upload.time, "monotonic", lambda now=60.0 * minute: 1e6 + now)
        work()
        counts.append(copies.copy(last=False))
    assert counts == [2051] + 9 * [3] + [2051]
    work()
    assert copies.copy() == 2051
    assert CountedStore.puts == 3 * 2051 + 9 * 3


def test_a_run_is_restored_from_its_url_on_a_head_that_does_not_have_it(tmp_path, monkeypatch):
    first, second, url = tmp_path / "first", tmp_path / "second", f"file://{tmp_path}/there"
    run = first / "t/1"
    (run / "logs").mkdir(parents=True)
    for name in ("experiment.toml", "metrics.jsonl", "logs/stage-0-0.log"):
        (run / name).write_text(name)
    (tmp_path / "notes").write_text(f"{run}\n")
    RunCopies(first, tmp_path / "notes", url).copy()
    said = []
    second.mkdir()
    monkeypatch.setattr(in_job_upload, "RUNS", second)
    restore("t/1", said.append)  # without a URL
    monkeypatch.setenv(COPIES, url)
    restore("t/2", said.append)  # which the URL does not have
    assert (list(second.iterdir()), said) == ([], [])
    restore("t/1", said.append)
    assert said == [f"copied run t/1 from {url}/runs/t/1"]
    files = {str(path.relative_to(second)): path.read_text() for path in second.rglob("*") if path.is_file()}
    assert files == {f"t/1/{name}": name for name in ("experiment.toml", "metrics.jsonl", "logs/stage-0-0.log")}
    (second / "t/1/metrics.jsonl").write_text("newer")
    restore("t/1", said.append)
    assert (second / "t/1/metrics.jsonl").read_text() == "newer"


def test_a_restore_that_fails_leaves_nothing(tmp_path, monkeypatch):
    (tmp_path / "there/runs/t/1").mkdir(parents=True)
    for name in "ab":
        (tmp_path / "there/runs/t/1" / name).write_text(name)

    class Failing(LocalFileSystem):
        cachable = False

        def get_file(self, path1, path2, **options):
            if path1.endswith("b"):
                raise OSError(5, "Input/output error")
            super().get_file(path1, path2, **options)

    monkeypatch.setattr(in_job_upload, "RUNS", tmp_path / "runs")
    monkeypatch.setattr(in_job_upload, "open_store", lambda url: (Failing(), str(tmp_path / "there/runs/t/1")))
    monkeypatch.setenv(COPIES, "s3://bucket/x")
    with pytest.raises(
        CopyError, match=r"run t/1 is not on this head, and could not be copied from s3://bucket/x/runs"
    ):
        restore("t/1", print)
    assert list((tmp_path / "runs/t").iterdir()) == []


def test_what_a_run_has_removed_is_not_restored(tmp_path, monkeypatch):
    """Such as the record of a finished run that continues from an earlier step."""
    run, there = tmp_path / "runs/t/1", tmp_path / "there/runs/t/1"
    run.mkdir(parents=True)
    for name in ("experiment.toml", "record.json"):
        (run / name).write_text(name)
    (tmp_path / "notes").write_text(f"{run}\n")
    for copies in (RunCopies(tmp_path / "runs", tmp_path / "notes", f"file://{tmp_path}/there") for _ in range(2)):
        (run / "record.json").write_text("record")
        copies.copy()
        assert (there / "record.json").exists()
        (run / "record.json").unlink()
        copies.copy()
        assert [path.name for path in there.iterdir()] == ["experiment.toml"]
    (there / "record.json").write_text("of another driver")
    RunCopies(tmp_path / "runs", tmp_path / "notes", f"file://{tmp_path}/there").copy()
    assert [path.name for path in there.iterdir()] == ["experiment.toml"]
