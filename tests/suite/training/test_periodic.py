"""A periodic thread: not before its time, repeatedly, not after its end, and without delaying the end."""

import sys
import threading
import time

from suite.training.periodic import PeriodicThread


def test_a_call_that_hangs_holds_up_no_end():
    began, released = threading.Event(), threading.Event()

    def hang():
        began.set()
        released.wait(60)

    recurring = PeriodicThread(hang, 0.01, "hanging")
    recurring.start()
    assert began.wait(60)
    assert not recurring.end(0.05)
    released.set()
    assert recurring.end(60)


def test_what_is_ended_within_its_period_was_not_done():
    recurring = PeriodicThread(lambda: done.append(1), 60.0, "late")
    done: list[int] = []
    recurring.start()
    assert recurring.end()
    assert done == []


def test_an_exception_is_told_once_and_ends_nothing_even_if_whoever_is_told_fails():
    errors, calls, enough = [], 0, threading.Event()

    def fail():
        nonlocal calls
        calls += 1
        if calls == 5:
            enough.set()
        raise ValueError("the first kind" if calls < 3 else "the second kind")

    def tell(error):
        errors.append(error)
        raise BrokenPipeError

    recurring = PeriodicThread(fail, 0.01, "failing", tell)
    recurring.start()
    assert enough.wait(60)
    assert not recurring.died
    assert recurring.end()
    assert [str(error) for error in errors] == ["the first kind", "the second kind"]


def test_a_thread_that_is_gone_is_missed():
    recurring = PeriodicThread(sys.exit, 0.01, "gone")
    assert not recurring.died
    recurring.start()
    until = time.monotonic() + 60
    while not recurring.died:
        assert time.monotonic() < until
        time.sleep(0.01)
    recurring.end()
    assert not recurring.died
