"""A disk that is full for a while, and one that stays so: a real file system of a few pages."""

import os
import subprocess
import threading
import time
from functools import partial

import pytest

from launch.backends.processes import run_processes
from suite.errors import CheckpointError
from tests.slow.trial import Trials, assert_same
from tests.suite.training.checkpoint.fuzz import files_of
from tests.suite.training.checkpoint.saves import list_checkpoints
from tests.suite.training.work import run


@pytest.fixture
def disk(tmp_path):
    """Returns a function from a size to a file system of its own."""
    if os.geteuid() != 0:
        pytest.skip("mounting a file system takes root; files that cannot grow are tested in tests/training")
    folder = tmp_path / "disk"
    folder.mkdir()

    def mounted(size):
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", folder], check=True)
        return folder

    yield mounted
    subprocess.run(["umount", folder], check=True)


@pytest.fixture
def small_disk(disk):
    """Room for four checkpoints of the toy model."""
    return disk("192k")


class Ballast:
    """Fills the disk before one step and frees it before another."""

    def __init__(self, path, fill, free):
        self.path, self.fill, self.free = path, fill, free

    def __call__(self, step):
        if step == self.fill:
            with open(self.path, "wb", buffering=0) as file:
                try:
                    while True:
                        file.write(bytes(4096))
                except OSError:
                    pass
        if step == self.free:
            self.path.unlink(missing_ok=True)


def nothing(step):
    """The disk stays as it is."""


def test_a_whole_run_goes_on_over_a_full_disk_with_all_its_lines(disk, tmp_path, monkeypatch):
    """Metrics, messages and checkpoints on one disk, full from step 6 on for two seconds."""
    settings = "train.steps=40 train.checkpoint_every=10 pipeline.stages=2"
    undisturbed = Trials(tmp_path).train(monkeypatch, settings)
    place = disk("8m")
    filled = threading.Event()

    def fill():
        metrics = place / "run-1" / "metrics.jsonl"
        until = time.monotonic() + 60
        while not metrics.exists() or len(metrics.read_text().splitlines()) < 6:
            assert time.monotonic() < until
            time.sleep(0.01)
        ballast = Ballast(place / "ballast", 0, 1)
        ballast(0)
        filled.set()
        time.sleep(2)
        ballast(1)

    beside = threading.Thread(target=fill)
    beside.start()
    planned = [{"fault": "sleep", "seconds": 3, "stage": 0, "step": 25, "action": "F1"}]
    disturbed = Trials(tmp_path, place).train(monkeypatch, settings, planned)
    beside.join()
    assert filled.is_set()
    assert disturbed.error is None, disturbed.said
    assert [line["outcome"] for line in disturbed.ends] == ["done"], disturbed.said
    assert "was not written" in disturbed.said
    assert_same(disturbed, undisturbed)


def trained(stages, until, folder, at=nothing):
    return run_processes(partial(run, folder=folder, at=at), stages, stages, 1, until)


def test_training_goes_on_over_a_full_disk_and_saves_again(small_disk, tmp_path):
    undisturbed = trained(2, 100, str(tmp_path / "other"))
    disturbed = trained(2, 100, str(small_disk / "run"), Ballast(small_disk / "ballast", 25, 75))
    assert [seen for seen, _ in disturbed] == [seen for seen, _ in undisturbed]  # to the bit
    steps = [found.step for found in list_checkpoints(small_disk / "run", print)]
    assert steps == [100, 80]  # those of 40 and 60 failed


def test_a_disk_that_stays_full_ends_the_run_and_leaves_the_old_checkpoint(small_disk):
    with pytest.raises(CheckpointError, match=r"3 checkpoints in a row .* No space left on device") as ended:
        trained(2, 200, str(small_disk / "run"), Ballast(small_disk / "ballast", 25, -1))
    assert "the newest checkpoint is of step 20" in str(ended.value)
    (found,) = list_checkpoints(small_disk / "run", print)
    assert found.step == 20
    assert len(files_of(small_disk / "run" / found.folder)) == 6
    for layer in range(6):
        found.read(layer)
