"""A timeline's numbers, on a step drawn by hand."""

import pytest

from suite.pipeline.schedule.timeline import Span, Timeline

STEP = Timeline(
    (
        (
            Span("F", 0, 0, 1), Span("F", 1, 1, 2), Span("B", 1, 5, 7),
            Span("R", 0, 7, 8), Span("B", 0, 8, 10), Span("U", -1, 10, 12),
        ),
        (
            Span("F", 0, 1, 2), Span("F", 1, 2, 3), Span("B", 1, 3, 5),
            Span("R", 0, 5, 6), Span("B", 0, 6, 8), Span("U", -1, 10, 11),
        ),
    )
)  # fmt: skip


def test_busy_idle_and_bubble():
    assert STEP.seconds == 12
    assert [STEP.busy(k) for k in (0, 1)] == [9, 8]
    assert [STEP.busy(0, kinds) for kinds in ("F", "R", "B", "U", "FR", "")] == [2, 1, 4, 2, 3, 0]
    assert STEP.idle(0) == pytest.approx(3 / 12)
    assert STEP.idle(1) == pytest.approx(4 / 12)
    assert STEP.bubble == pytest.approx(7 / 24)


@pytest.mark.parametrize(("seconds", "bubble"), [(0, 0), (4, 0.5)])
def test_a_stage_without_actions_is_idle_throughout_a_step_in_which_something_happens(seconds, bubble):
    step = Timeline(((), (Span("F", 0, 0, seconds),)))
    assert (step.seconds, step.bubble) == (seconds, bubble)
