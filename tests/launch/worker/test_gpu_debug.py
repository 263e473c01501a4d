"""What a worker on a GPU leaves behind, as far as a CPU can show it: torch's functions are replaced at the border."""

import os
import time

import pytest
import torch

from launch.worker import gpu_debug
from launch.worker.gpu_debug import leave_gpu_dumps, start_flight_recorder
from suite.pipeline.model.topology import RankCoord
from suite.pipeline.runtime.worker_status import WorkerStatus

COORD = RankCoord(3, 2, 2)


@pytest.fixture(autouse=True)
def border(monkeypatch):
    """Records calls of torch's private functions; returns them."""
    calls = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **given: calls.append(("history", given)))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: calls.append(("snapshot", path)))
    monkeypatch.setattr(torch._C._distributed_c10d, "_dump_nccl_trace", lambda: b"records", raising=False)
    monkeypatch.setattr(gpu_debug, "_POLL_S", 0.01)
    return calls


def status(limit_s):
    found = WorkerStatus(action_timeout_s=limit_s)
    found.begin("update", 4)
    return found


def test_running_out_of_memory_leaves_a_snapshot_and_raises(tmp_path, border):
    with (
        pytest.raises(torch.OutOfMemoryError),
        leave_gpu_dumps(tmp_path / "gpu", COORD, 1, status(60), with_stacks=True),
    ):
        raise torch.OutOfMemoryError("1 GiB")
    assert border == [
        ("history", {"max_entries": 100_000}), ("snapshot", str(tmp_path / "gpu" / "memory-1-1.pickle")),
    ]  # fmt: skip


def test_other_ends_leave_no_snapshot_and_stacks_are_recorded_only_on_demand(tmp_path, border):
    with pytest.raises(ValueError, match="x"), leave_gpu_dumps(tmp_path, COORD, 1, status(60), with_stacks=False):
        raise ValueError("x")
    with leave_gpu_dumps(tmp_path, COORD, 1, status(60), with_stacks=False):
        pass
    assert border == []
    assert list(tmp_path.iterdir()) == []


def test_an_action_that_takes_too_long_leaves_nccls_records_before_its_limit(tmp_path):
    stalled, limit_s = status(10.0), 10.0
    stalled.began_s -= 0.6 * limit_s
    with leave_gpu_dumps(tmp_path, COORD, 2, stalled, with_stacks=False):
        until = time.monotonic() + 20
        while not (path := tmp_path / "attempt-2-rank-3").exists() and time.monotonic() < until:
            time.sleep(0.01)
    assert path.read_bytes() == b"records"


def test_the_flight_recorders_variables_are_set_unless_the_user_has(tmp_path, monkeypatch):
    for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_FR_DUMP_TEMP_FILE"):
        monkeypatch.setenv(name, "")  # so that it is restored, whatever it was
        monkeypatch.delenv(name)
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "7")
    start_flight_recorder(tmp_path / "gpu", 1)
    assert os.environ["TORCH_FR_BUFFER_SIZE"] == "7"
    assert os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
    assert os.environ["TORCH_FR_DUMP_TEMP_FILE"] == str(tmp_path / "gpu" / "attempt-1-rank-")
