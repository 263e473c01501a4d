"""A timeline's numbers and picture, on a step drawn by hand."""

import pytest

from suite.pipeline.schedule.timeline import Span, Timeline, text

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


def test_spans_print_as_actions():
    assert [str(span) for span in STEP.rows[0]] == ["F0", "F1", "B1", "R0", "B0", "U"]
    assert STEP.rows[0][2].seconds == 2


def test_the_picture_has_a_character_for_each_share_of_the_step():
    assert text(STEP, 12).splitlines() == [
        "stage 0   FF...BBRBBUU",
        "stage 1   .FFBBRBB..U.",
    ]


def test_twice_as_fine_a_picture_says_everything_twice():
    assert text(STEP, 24).splitlines() == [
        "stage 0   FFFF......BBBBRRBBBBUUUU",
        "stage 1   ..FFFFBBBBRRBBBB....UU..",
    ]


def test_a_coarse_character_is_what_fills_most_of_its_time():
    # by four: stage 0 has F 2 | B 2, R 1, . 1 | B 2, U 2; stage 1 has F 2, B 1, . 1 | B 3, R 1 | U 1, . 3
    assert text(STEP, 3).splitlines() == ["stage 0   .BB", "stage 1   FB."]


def test_a_step_in_which_nothing_happened_is_drawn_as_waiting():
    nothing = Timeline(((), (Span("F", 0, 0, 0),)))
    assert nothing.seconds == 0
    assert nothing.bubble == 0
    assert text(nothing, 3).splitlines() == ["stage 0   ...", "stage 1   ..."]


def test_a_stage_without_actions_is_idle_throughout():
    assert Timeline(((), (Span("F", 0, 0, 4),))).bubble == 0.5
