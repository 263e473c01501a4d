"""Traces: what each worker wrote becomes one timeline, whatever their clocks; a resumed run's is of one pipeline."""

import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from launch.backends.processes import run_processes
from suite.pipeline.model.topology import RankCoord
from suite.pipeline.schedule.timeline import Span
from suite.training import trace
from suite.training.jsonl import JsonLinesFile
from suite.training.trace import TraceWriter, perfetto, read_traces
from tests.suite.pipeline.build import CPU, join


def head(replica, stage, clock=0.0, stages=2):
    return {"replica": replica, "stage": stage, "stages": stages, "clock": clock}


def step(number, began, *spans):
    return {"step": number, "began": began, "spans": [list(span) for span in spans]}


def put(folder, replica, stage, *lines, torn=""):
    text = "".join(json.dumps(line) + "\n" for line in lines) + torn
    (folder / f"{replica}-{stage}.jsonl").write_text(text)


@pytest.fixture
def four(tmp_path):
    """Two replicas of two stages. The hosts of stages 1 are 100 s ahead and 50 s behind; the last line of one is torn.

    Replica 0, step 3, in seconds of rank 0:  stage 0   10 .F0.  .  .  .B0. 16     stage 1   11 . .F0.B0. 14
    """
    put(tmp_path, 0, 0, head(0, 0), step(3, 10, ("F", 0, 10.5, 11), ("B", 0, 14, 15), ("U", -1, 15, 16)),
        step(4, 20, ("F", 0, 20, 21)))  # fmt: skip
    put(tmp_path, 0, 1, head(0, 1, -100), step(3, 110.25, ("F", 0, 111, 112), ("B", 0, 112, 114), ("U", -1, 115, 116)),
        torn='{"step": 4, "began": 120, "spa')  # fmt: skip
    put(tmp_path, 1, 0, head(1, 0), step(3, 9, ("F", 0, 9, 10)), step(4, 20, ("F", 0, 20, 21)))
    put(tmp_path, 1, 1, head(1, 1, 50), step(3, -40, ("F", 0, -40, -38)), step(4, -30, ("F", 0, -29, -28)))
    return tmp_path


def test_workers_of_one_step_come_together_in_the_time_of_rank_0(four):
    found = read_traces(four)
    assert [(one.replica, one.step, one.began) for one in found] == [(0, 3, 10), (1, 3, 9), (1, 4, 20)]
    assert found[0].timeline.rows == (
        (Span("F", 0, 0.5, 1), Span("B", 0, 4, 5), Span("U", -1, 5, 6)),
        (Span("F", 0, 1, 2), Span("B", 0, 2, 4), Span("U", -1, 5, 6)),
    )
    assert found[1].timeline.rows == ((Span("F", 0, 0, 1),), (Span("F", 0, 1, 3),))
    assert found[2].timeline.rows == ((Span("F", 0, 0, 1),), (Span("F", 0, 1, 2),))


def test_a_replica_of_which_a_stage_is_missing_is_not_shown(four):
    (four / "0-0.jsonl").unlink()
    (four / "1-1.jsonl").write_text("")  # its worker died at once
    assert read_traces(four) == read_traces(four / "nowhere") == []
    assert perfetto([])["traceEvents"] == []


def test_perfetto_gets_microseconds_from_the_first_traced_step(four):
    found = json.loads(json.dumps(perfetto(read_traces(four)), allow_nan=False))
    spans = [event for event in found["traceEvents"] if event["ph"] == "X"]
    assert len(spans) == 6 + 2 + 2
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in spans)
    assert {event["name"] for event in spans} == {"F0", "B0", "U"}
    assert {event["cat"] for event in spans} == {"forward", "backward", "update"}
    # the first step is replica 1's, begun at 9; replica 0's stage 1 runs B0 from 12 to 14
    (one,) = (event for event in spans if (event["pid"], event["tid"], event["name"]) == (0, 1, "B0"))
    assert (one["ts"], one["dur"]) == pytest.approx((3e6, 2e6))
    assert one["args"] == {"step": 3, "micro_batch": 0, "virtual_stage": 0}
    marks = [event for event in found["traceEvents"] if event["ph"] == "M"]
    names = {(mark["pid"], mark["tid"], mark["name"]): mark["args"]["name"] for mark in marks}
    assert names[0, 1, "thread_name"] == names[1, 1, "thread_name"] == "stage 1"
    assert names[1, 0, "process_name"] == "replica 1"
    assert len(names) == 2 * 4


def traced(rank, world, rendezvous, folder, stages, start, every_step, until):
    """Walks steps as the training loop does; each has a forward of 2 ms and an update."""
    join(rank, world, rendezvous)
    writer = TraceWriter(Path(folder), RankCoord(rank, stages, world // stages), CPU, start, every_step)
    for number in range(start, until):
        recorder = writer.recorder(number)
        if recorder is not None:
            mark = recorder.mark()
            time.sleep(0.002)
            recorder.record("F", 0, mark)
            recorder.record("U", -1, recorder.mark())
            writer.write(number, recorder)


def write(folder, workers, stages, start=0, every_step=False, until=12):
    run_processes(traced, workers, str(folder), stages, start, every_step, until)
    return read_traces(folder)


def test_five_steps_after_the_first_two_are_traced_and_read_back_or_all_when_asked(tmp_path):
    every = write(tmp_path / "every", 2, 1, every_step=True, until=9)
    assert [(one.replica, one.step) for one in every] == [(r, number) for r in (0, 1) for number in range(9)]
    found = write(tmp_path / "trace", 2, 2)
    assert [(one.replica, one.step) for one in found] == [(0, number) for number in range(2, 7)]
    for one in found:
        assert [[str(span) for span in row] for row in one.timeline.rows] == [["F0", "U"]] * 2
        assert all(0 <= row[0].start < row[0].end <= row[1].end for row in one.timeline.rows)
        assert all(row[0].seconds >= 0.0019 for row in one.timeline.rows)
    assert [one.began for one in found] == sorted(one.began for one in found)


def test_a_resumed_run_drops_the_steps_that_it_does_again(tmp_path):
    for stage in (0, 1):
        lines = [step(number, 0.5, ("F", 0, 1, 2)) for number in (1, 2, 3, 4, 5)]
        put(tmp_path, 0, stage, head(0, stage, 1000.0), *lines, torn='{"step": 6')
    found = write(tmp_path, 2, 2, start=4, until=8)
    assert [one.step for one in found] == [1, 2, 3, 6, 7]  # after a start again two that are not traced
    assert [one.began for one in found[:3]] == [1000.5] * 3  # by the clock that they were written with
    assert all(abs(time.monotonic() - one.began) < 60 for one in found[3:])
    text = (tmp_path / "0-1.jsonl").read_text()
    assert text.count('"step": 4') == 0
    assert text.endswith("}\n")


def test_a_run_resumed_with_other_stages_forgets_those_of_before(tmp_path):
    for replica in (0, 1):
        for stage in (0, 1):
            put(tmp_path, replica, stage, head(replica, stage), step(3, 1.0, ("F", 0, 1, 2)))
    found = write(tmp_path, 1, 1, start=5, until=8)
    assert [(one.replica, one.step, len(one.timeline.rows)) for one in found] == [(0, 7, 1)]
    assert len(list(tmp_path.iterdir())) == 1


def test_a_step_that_begins_with_its_first_action_begins_at_zero(tmp_path):
    """Times are rounded; an action may not begin before its step does."""

    class Now:
        began = 1.0000004

        def spans(self):
            return [Span("F", 0, 1.00000043, 1.0000009)]

    writer = object.__new__(TraceWriter)
    writer._file = JsonLinesFile(tmp_path / "0-0.jsonl")
    writer._file.write(head(0, 0, stages=1))
    writer.write(0, Now())
    (found,) = read_traces(tmp_path)
    assert found.timeline.rows[0][0].start >= 0


def offset(rank, world, rendezvous, host, ahead):
    """Returns this worker's offset; that of rank 1 is on another host, whose clock is ahead."""
    join(rank, world, rendezvous)
    if rank == 1:
        trace.socket = SimpleNamespace(gethostname=lambda: host)
        trace.time = SimpleNamespace(monotonic=lambda: time.monotonic() + ahead)
    return trace.clock_offset()


def test_clocks_of_one_host_are_one_and_those_of_others_are_compared():
    mine = trace.socket.gethostname()
    assert run_processes(offset, 2, mine, 100.0) == [0.0, 0.0]
    first, second = run_processes(offset, 2, f"not-{mine}", 100.0)
    assert first == 0.0
    assert second == pytest.approx(-100.0, abs=2.0)  # but for the time the message takes
