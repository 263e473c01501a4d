"""Mini-batches made ahead: the same ones, in the same order, whoever asks."""

import threading
import time

import pytest

from launch import ahead
from launch.ahead import Ahead
from suite.errors import DataError


def test_each_step_gets_its_own_and_the_next_is_made_beside():
    made, warmed, here = [], [], threading.get_ident()

    def make(step):
        made.append((step, threading.get_ident() == here))
        return f"batch {step}"

    batches = Ahead(make, steps=4, warm=warmed.append)
    assert [batches(step) for step in range(4)] == [f"batch {step}" for step in range(4)]
    batches.close()
    assert made == [(step, False) for step in range(4)]  # once each, none beyond the last, all beside
    assert warmed == [f"batch {step}" for step in range(4)]


def test_the_next_is_made_before_it_is_asked_for():
    ready = threading.Event()
    batches = Ahead(lambda step: ready.set() if step == 6 else "first", steps=9)
    assert batches(5) == "first"
    assert ready.wait(10)
    batches.close()


def test_a_step_out_of_order_is_made_then():
    batches = Ahead(str, steps=99)
    assert [batches(7), batches(3), batches(4)] == ["7", "3", "4"]
    batches.close()


def test_stages_between_make_none():
    asked = []
    batches = Ahead(lambda step: asked.append(step), steps=9)
    assert batches(0) is None
    assert batches(1) is None
    batches.close()
    assert asked == [0, 1]


def test_a_fault_is_raised_where_the_batch_is_asked_for():
    def make(step):
        if step == 1:
            raise DataError("the file is gone")
        return "batch"

    batches = Ahead(make, steps=3)
    assert batches(0) == "batch"
    with pytest.raises(DataError, match="the file is gone"):
        batches(1)
    batches.close()


def test_one_that_never_comes_is_told(monkeypatch):
    monkeypatch.setattr(ahead, "FIRST_DEADLINE", 0.2)
    batches = Ahead(lambda step: time.sleep(1), steps=3)
    with pytest.raises(DataError, match="mini-batch of step 0 was not made within 0 s"):
        batches(0)
    batches.close()
