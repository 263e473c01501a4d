"""What a stage did and when: spans of notes, and those of real steps in the order of the schedule."""

import time
from itertools import pairwise

import pytest
import torch

from launch.backends.processes import run_processes
from suite.pipeline.model.topology import RankCoord
from suite.pipeline.runtime.recorder import Recorder
from suite.pipeline.schedule.timeline import Span
from tests.suite.pipeline.build import build, join, mini_batch
from tests.suite.pipeline.schedule_helpers import fill_drain
from tests.suite.pipeline.toy import SumLoss, toy_batch, toy_layers


def test_spans_are_what_was_noted_in_its_order():
    recorder = Recorder(torch.device("cpu"))
    began = recorder.begin()
    assert recorder.spans() == []
    first = recorder.mark()
    time.sleep(0.01)
    recorder.record("F", 3, first)
    second = recorder.mark()
    recorder.record("U", -1, second)
    forward, update = recorder.spans()
    assert (str(forward), str(update)) == ("F3", "U")
    assert began == recorder.began <= first == forward.start
    assert forward.start + 0.01 <= forward.end <= second == update.start <= update.end <= time.monotonic()
    assert recorder.spans() == [forward, update]
    assert recorder.begin() > began
    assert recorder.spans() == []  # a new step forgets the last


def record_steps(rank, world, rendezvous, micro_batches, remats):
    """Returns by way to recompute (what was noted before there was a recorder, when the step began, its spans)."""
    join(rank, world, rendezvous)
    found = []
    for remat in remats:
        executor, *_ = build(RankCoord(rank, world, 1), toy_layers(), SumLoss(), remat)
        ids, labels = toy_batch(2 * micro_batches)
        batch = mini_batch(ids, labels, micro_batches)
        executor.train(batch, 0)
        executor.recorder = recorder = Recorder(torch.device("cpu"))
        for step in (1, 2):
            began = recorder.begin()
            executor.train(batch, step)
        found.append((began, recorder.spans()))
    return found


@pytest.fixture(scope="module")
def recorded():
    """[stage][way to recompute] -> (began, spans), of M = 4 over 2 stages."""
    return run_processes(record_steps, 2, 4, ["except_last", "always", "never"])


def test_a_step_is_recorded_action_by_action(recorded):
    for stage in recorded:
        for (began, spans), remat in zip(stage, ["except_last", "always", "never"], strict=True):
            (actions,) = fill_drain(1, 4, remat)
            assert [str(span) for span in spans] == [str(action) for action in actions]
            before = began
            for span in spans:
                assert before <= span.start <= span.end
                before = span.end


def test_a_span_begins_when_its_message_is_there(recorded):
    """The clock is the host's, so that of one stage can be held against that of another."""
    for here, there in pairwise(recorded):
        for (_, sent), (_, taken) in zip(here, there, strict=True):
            sender, taker = by_action(sent), by_action(taken)
            for i in range(4):
                assert sender[f"F{i}"].end <= taker[f"F{i}"].start
                assert taker[f"B{i}"].end <= sender[f"B{i}"].start


def by_action(spans: list[Span]) -> dict[str, Span]:
    return {str(span): span for span in spans}
