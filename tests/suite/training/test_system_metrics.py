"""Workers' use of their machine: lines in the run's folder, read back by the metrics rank."""

import time
from pathlib import Path

import pytest
import torch

from suite.pipeline.model.topology import RankCoord
from suite.pipeline.runtime.p2p import MessageTimeout, wait
from suite.pipeline.runtime.worker_status import WorkerStatus
from suite.training import system_metrics
from suite.training.jsonl import read_lines
from suite.training.system_metrics import SystemMetrics, path_of, peak_bytes

CPU = torch.device("cpu")


class Work:
    """A message that takes its time."""

    def wait(self, timeout):
        time.sleep(0.05)


def gauged(folder, rank, attempt=1, status=None):
    return SystemMetrics(folder, RankCoord(rank, 2, 1), attempt, status or WorkerStatus(MessageTimeout(1.0)), CPU)


def test_the_speaker_reads_what_all_stages_of_its_attempt_noted_last(tmp_path):
    folder = tmp_path / "system"
    with gauged(folder, 0):
        pass
    with gauged(folder, 0, attempt=2) as first, gauged(folder, 1, attempt=2) as speaker:
        speaker.sample()
        assert speaker.latest() == {}  # stage 0's line is of attempt 1
        del first
    speaker.sample()
    found = speaker.latest()
    assert sorted(found) == [
        f"pipeline/stage.0.{stage}/{name}"
        for stage in (0, 1)
        for name in ("cpu_percent", "resident_bytes", "waiting_percent")
    ]
    for stage in (0, 1):
        last = read_lines(path_of(folder, 0, stage))[-1]
        assert found[f"pipeline/stage.0.{stage}/resident_bytes"] == last["resident_bytes"]
    assert found["pipeline/stage.0.0/resident_bytes"] > 2**20
    assert speaker.latest() == {}  # told once


def test_lines_say_after_which_step_and_go_when_the_run_goes_back(tmp_path):
    for start, steps in ((None, 6), (3, 1)):
        status = WorkerStatus(MessageTimeout(1.0), first_step=start)
        with gauged(tmp_path, 0, status=status):
            status.steps_done = steps
    assert [line["step"] for line in read_lines(path_of(tmp_path, 0, 0))] == [4]


def test_waits_are_counted_also_the_present_one(tmp_path):
    status = WorkerStatus(MessageTimeout(1.0))
    with gauged(tmp_path, 0, status=status):
        begin = time.monotonic()
        wait(Work(), status.message_timeout, "a message", CPU)
        assert 0.05 <= status.message_timeout.total_waited_s() <= time.monotonic() - begin
        before = status.message_timeout.waited_s
        status.message_timeout.began_s, status.message_timeout.waiting_for = time.monotonic(), "another"
        time.sleep(0.01)
        assert status.message_timeout.total_waited_s() >= before + 0.01
    (line,) = read_lines(path_of(tmp_path, 0, 0))
    assert 0 < line["waiting_percent"] <= 100


def test_a_line_is_written_again_and_again_beside_the_training(tmp_path, monkeypatch):
    monkeypatch.setattr(system_metrics, "PERIOD", 0.01)
    with gauged(tmp_path, 1) as speaker:
        until = time.monotonic() + 20
        while not (found := speaker.latest()):
            assert time.monotonic() < until
            time.sleep(0.005)
    assert found["pipeline/stage.0.1/resident_bytes"] > 0
    assert len(read_lines(path_of(tmp_path, 0, 1))) >= 2


def test_the_peak_of_memory_is_that_of_the_kernel_in_bytes():
    status = Path("/proc/self/status").read_text()
    (kib,) = (int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:"))
    assert peak_bytes(torch.device("cpu")) == pytest.approx(1024 * kib, rel=0.05)


def test_the_lines_of_a_long_run_become_rarer(tmp_path, monkeypatch):
    now, written = 0.0, []
    monkeypatch.setattr(system_metrics.time, "monotonic", lambda: now)
    writer = gauged(tmp_path, 0)
    monkeypatch.setattr(writer, "_write", lambda: written.append(now))
    while now < 30 * 86400:
        now += system_metrics.PERIOD
        writer._write_and_sample()
    assert written[:4000] == [10.0 * (at + 1) for at in range(4000)]
    assert 20_000 < len(written) < 30_000
    assert written[-1] - written[-2] < 600


def test_of_many_workers_the_spread_is_told_and_who_is_highest():
    values = {
        (replica, stage): {"cpu_percent": float(replica * 8 + stage)} for replica in range(128) for stage in range(8)
    }
    values[3, 5] |= {"resident_bytes": 7.0}
    found = system_metrics.spread(values, 8)
    assert found == {
        "pipeline/all/cpu_percent_min": 0.0, "pipeline/all/cpu_percent_median": 512.0,
        "pipeline/all/cpu_percent_max": 1023.0, "pipeline/all/resident_bytes_min": 7.0,
        "pipeline/all/resident_bytes_median": 7.0, "pipeline/all/resident_bytes_max": 7.0,
        "pipeline/all/cpu_percent_max_rank": 1023, "pipeline/all/resident_bytes_max_rank": 29,
    }  # fmt: skip


@pytest.mark.parametrize(("replicas", "reads"), [(32, 10), (640, 1)])
def test_the_lines_of_many_workers_are_read_less_often(tmp_path, monkeypatch, replicas, reads):
    now, sampled = [0.0], []
    monkeypatch.setattr(system_metrics.time, "monotonic", lambda: now[0])
    metrics = SystemMetrics(tmp_path, RankCoord(0, 1, replicas), 1, WorkerStatus(MessageTimeout(1.0)), CPU)
    monkeypatch.setattr(metrics, "sample", lambda: sampled.append(now[0]))
    for now[0] in range(0, 100, 10):
        metrics._write_and_sample()
    assert len(sampled) == reads
