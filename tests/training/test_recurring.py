"""What is done now and then: not before its time, again and again, not after its end, and without holding that up."""

import threading

from suite.training.recurring import Recurring


def test_it_is_done_until_it_is_ended():
    done, seen = 0, threading.Event()

    def once_more():
        nonlocal done
        done += 1
        if done == 3:
            seen.set()

    recurring = Recurring(once_more, 0.01, "counting")
    recurring.start()
    assert seen.wait(60)
    assert recurring.end()
    assert not any(thread.name == "counting" for thread in threading.enumerate())


def test_a_call_that_hangs_holds_up_no_end():
    began, released = threading.Event(), threading.Event()

    def hang():
        began.set()
        released.wait(60)

    recurring = Recurring(hang, 0.01, "hanging")
    recurring.start()
    assert began.wait(60)
    assert not recurring.end(0.05)
    released.set()
    assert recurring.end(60)


def test_what_is_ended_within_its_period_was_not_done():
    recurring = Recurring(lambda: done.append(1), 60.0, "late")
    done: list[int] = []
    recurring.start()
    assert recurring.end()
    assert done == []
