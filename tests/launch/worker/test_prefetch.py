"""Prefetched mini-batches: the same ones, in the same order."""

import threading
import time

import pytest

from launch.worker import prefetch
from launch.worker.prefetch import Prefetcher
from suite.errors import DataError


def test_each_step_gets_its_batch_and_the_next_is_made_in_the_thread():
    made, warmed, here = [], [], threading.get_ident()

    def make(step):
        made.append((step, threading.get_ident() == here))
        return f"batch {step}"

    batches = Prefetcher(make, steps=4, prepare=warmed.append)
    assert [batches(step) for step in range(4)] == [f"batch {step}" for step in range(4)]
    batches.close()
    assert made == [(step, False) for step in range(4)]  # once each, none beyond the last, all beside
    assert warmed == [f"batch {step}" for step in range(4)]


def test_the_next_is_made_from_the_call_on():
    made = []
    batches = Prefetcher(lambda step: made.append(step) or "batch", steps=3, start_at_once=False)
    assert batches(0) == "batch"
    batches.start_next()
    assert batches(1) == "batch"
    assert made == [0, 1]  # without the call step 2 is made only when it is asked for
    assert batches(2) == "batch"
    batches.start_next()  # there is no step 3
    batches.close()
    assert made == [0, 1, 2]


def test_a_step_out_of_order_is_made_on_request():
    batches = Prefetcher(str, steps=99)
    assert [batches(7), batches(3), batches(4)] == ["7", "3", "4"]
    batches.close()


def test_an_error_is_raised_when_the_batch_is_requested():
    def make(step):
        if step == 1:
            raise DataError("the file is gone")
        return "batch"

    batches = Prefetcher(make, steps=3)
    assert batches(0) == "batch"
    with pytest.raises(DataError, match="the file is gone"):
        batches(1)
    batches.close()


def test_a_batch_that_takes_too_long_is_an_error(monkeypatch):
    monkeypatch.setattr(prefetch, "FIRST_ACTION_TIMEOUT_S", 0.2)
    batches = Prefetcher(lambda step: time.sleep(1), steps=3)
    with pytest.raises(DataError, match="mini-batch of step 1 was not ready within 0 s"):
        batches(0)
    batches.close()
