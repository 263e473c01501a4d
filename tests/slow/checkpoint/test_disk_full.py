"""A disk that is full for a while: a real file system of a few pages."""

import os
import subprocess
import threading
import time
from contextlib import suppress

import pytest

from tests.slow.trial import Trials, assert_same


@pytest.fixture
def disk(tmp_path):
    """A file system of its own."""
    if os.geteuid() != 0:
        pytest.skip("mounting a file system takes root; files that cannot grow are tested in tests/training")
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", folder], check=True)
    yield folder
    subprocess.run(["umount", folder], check=True)


def fill(path):
    """Leaves no room on the disk of a path."""
    with suppress(OSError), open(path, "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def test_a_whole_run_goes_on_over_a_full_disk_with_all_its_lines(disk, tmp_path, monkeypatch):
    """Metrics, messages and checkpoints on one disk, full from step 6 on for two seconds."""
    settings = "train.steps=40 train.checkpoint_every=10 pipeline.stages=2"
    undisturbed = Trials(tmp_path).train(monkeypatch, settings)
    filled = threading.Event()

    def fill_for_a_while():
        metrics = disk / "run-1" / "metrics.jsonl"
        until = time.monotonic() + 60
        while not metrics.exists() or len(metrics.read_text().splitlines()) < 6:
            assert time.monotonic() < until
            time.sleep(0.01)
        fill(disk / "ballast")
        filled.set()
        time.sleep(2)
        (disk / "ballast").unlink()

    beside = threading.Thread(target=fill_for_a_while)
    beside.start()
    planned = [{"fault": "sleep", "seconds": 3, "stage": 0, "step": 25, "action": "F1"}]
    disturbed = Trials(tmp_path, disk).train(monkeypatch, settings, planned)
    beside.join()
    assert filled.is_set()
    assert disturbed.error is None, disturbed.said
    assert [line["outcome"] for line in disturbed.ends] == ["done"], disturbed.said
    assert "was not written" in disturbed.said
    assert_same(disturbed, undisturbed)
