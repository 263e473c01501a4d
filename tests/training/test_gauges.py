"""What workers take of their machine: lines in the run's folder, read back by the one that speaks."""

import time

import pytest
import torch

from suite.pipeline.doing import Doing
from suite.pipeline.topology import Place
from suite.pipeline.transport import Deadline, wait
from suite.training import gauges
from suite.training.gauges import Gauges, path_of
from suite.training.lines import read_lines

CPU = torch.device("cpu")


class Work:
    """A message that takes its time."""

    def wait(self, timeout):
        time.sleep(0.05)


def gauged(folder, rank, attempt=1, doing=None):
    return Gauges(folder, Place(rank, 2, 1), attempt, doing or Doing(Deadline(1.0)), CPU)


def test_the_speaker_reads_what_all_stages_of_its_attempt_noted_last(tmp_path):
    folder = tmp_path / "system"
    with gauged(folder, 0):
        pass
    with gauged(folder, 0, attempt=2) as first, gauged(folder, 1, attempt=2) as speaker:
        speaker.look()
        assert speaker.newest() == {}  # stage 0's line is of attempt 1
        del first
    speaker.look()
    found = speaker.newest()
    assert sorted(found) == [
        f"stage/0.{stage}/{name}" for stage in (0, 1) for name in ("cpu_percent", "resident_bytes", "waiting_percent")
    ]
    for stage in (0, 1):
        assert found[f"stage/0.{stage}/resident_bytes"] == read_lines(path_of(folder, 0, stage))[-1]["resident_bytes"]
    assert found["stage/0.0/resident_bytes"] > 2**20
    assert speaker.newest() == {}  # told once


def test_lines_say_after_which_step_and_go_when_the_run_goes_back(tmp_path):
    for start, steps in ((None, 6), (3, 1)):
        doing = Doing(Deadline(1.0), start=start)
        with gauged(tmp_path, 0, doing=doing):
            doing.steps = steps
    assert [line["step"] for line in read_lines(path_of(tmp_path, 0, 0))] == [4]


def test_waits_are_counted_also_the_present_one(tmp_path):
    doing = Doing(Deadline(1.0))
    with gauged(tmp_path, 0, doing=doing):
        begin = time.monotonic()
        wait(Work(), doing.deadline, "a message", CPU)
        assert 0.05 <= doing.deadline.waited_now() <= time.monotonic() - begin
        before = doing.deadline.waited
        doing.deadline.began, doing.deadline.waiting = time.monotonic(), "another"
        time.sleep(0.01)
        assert doing.deadline.waited_now() >= before + 0.01
    (line,) = read_lines(path_of(tmp_path, 0, 0))
    assert 0 < line["waiting_percent"] <= 100


def test_a_line_is_written_again_and_again_beside_the_training(tmp_path, monkeypatch):
    monkeypatch.setattr(gauges, "PERIOD", 0.01)
    with gauged(tmp_path, 1) as speaker:
        until = time.monotonic() + 20
        while not (found := speaker.newest()):
            assert time.monotonic() < until
            time.sleep(0.005)
    assert found["stage/0.1/resident_bytes"] > 0
    assert len(read_lines(path_of(tmp_path, 0, 1))) >= 2


@pytest.mark.parametrize("torn", ["", "{", "not json\n", "[1]\n"])
def test_a_torn_file_tells_nothing(tmp_path, torn):
    with gauged(tmp_path, 1) as speaker:
        path_of(tmp_path, 0, 0).write_text(torn)
    speaker.look()
    assert {name.split("/")[1] for name in speaker.newest()} == {"0.1"}
