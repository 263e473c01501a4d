"""Schedules as pictures, and what the validator refuses."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from suite.errors import SettingError
from suite.pipeline.schedule import Action, draw, fill_drain, forward_only, validate


def parse(lines):
    return [[Action.parse(cell) for cell in line.split()] for line in lines]


def test_fill_drain_is_the_papers_picture():
    assert fill_drain(2, 3, "except_last") == parse(["F0 F1 F2 B2 R1 B1 R0 B0"] * 2)
    assert fill_drain(1, 3, "always") == parse(["F0 F1 F2 R2 B2 R1 B1 R0 B0"])
    assert fill_drain(1, 3, "never") == parse(["F0 F1 F2 B2 B1 B0"])
    assert forward_only(2, 2) == parse(["F0 F1"] * 2)


def test_played_with_equal_costs_a_stage_rebuilds_before_its_gradient_arrives():
    timeline = validate(fill_drain(3, 4, "except_last"), 4)
    assert draw(timeline).splitlines() == [
        "stage 0   F0 F1 F2 F3 .  .  .  .  B3 R2 B2 R1 B1 R0 B0",
        "stage 1   .  F0 F1 F2 F3 .  .  B3 R2 B2 R1 B1 R0 B0 . ",
        "stage 2   .  .  F0 F1 F2 F3 B3 R2 B2 R1 B1 R0 B0 .  . ",
    ]


@given(st.integers(1, 6), st.integers(0, 9), st.sampled_from(["always", "except_last", "never"]))
def test_every_fill_drain_is_valid_and_complete(stages, micro_batches, remat):
    schedule = fill_drain(stages, micro_batches, remat)
    timeline = validate(schedule, micro_batches)
    for actions, row in zip(schedule, timeline, strict=True):
        assert [cell for cell in row if cell != "."] == [str(action) for action in actions]
    assert sum(a.kind == "R" for a in schedule[0]) == {
        "always": micro_batches, "except_last": max(0, micro_batches - 1), "never": 0
    }[remat]  # fmt: skip
    validate(forward_only(stages, micro_batches), micro_batches, train=False)


@given(st.integers(1, 5), st.integers(1, 5), st.data())
def test_a_shuffled_stage_is_valid_only_if_each_order_holds(stages, micro_batches, data):
    """Whatever a shuffle does, the validator either refuses or returns a timeline with every action once."""
    schedule = fill_drain(stages, micro_batches, "always")
    schedule[0] = data.draw(st.permutations(schedule[0]))
    try:
        timeline = validate(schedule, micro_batches)
    except SettingError:
        return
    for i in range(micro_batches):
        at = [timeline[0].index(f"{kind}{i}") for kind in "FRB"]
        assert at == sorted(at)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["F0 B0", "F0"], "stage 1 never runs B0"),
        (["F0 F0 B0"], "stage 0 runs F0 more than once"),
        (["F0 B0 F2 B2"], "runs F2, but there are 1"),
        (["B0 F0"], "out of order: it must be F0, then R0"),
        (["R0 F0 B0"], "out of order"),
        (["F0 F1 B0 B1", "F1 F0 B0 B1"], r"disagree on the order of activations: \[0, 1\] against \[1, 0\]"),
        (["F0 F1 B0 B1", "F0 F1 B1 B0"], "disagree on the order of gradients"),
        (["F0 B0 F1 B1", "F0 F1 B0 B1"], r"deadlocks: stage 0 at B0, stage 1 at F1 wait for each other\nstage 0   F0"),
    ],
)
def test_faulty_schedules_are_refused_with_stage_and_action(lines, message):
    micro_batches = 2 if any("1" in line for line in lines) else 1
    with pytest.raises(SettingError, match=message):
        validate(parse(lines), micro_batches)


def test_the_picture_of_a_big_deadlock_is_cut_to_where_it_happens():
    stages, micro_batches = 40, 60
    schedule = [[Action(kind, i) for kind in "FB" for i in range(micro_batches)] for _ in range(stages)]
    schedule[24].remove(Action("B", 0))
    schedule[24].insert(micro_batches - 1, Action("B", 0))  # before the forward that stage 25 needs to send it
    with pytest.raises(SettingError) as caught:
        validate(schedule, micro_batches)
    first, *rows = str(caught.value).splitlines()
    assert "stage 24 at B0, stage 25 at F59" in first
    assert first.endswith("and 24 other stages wait for each other; "
                          "drawn are stages 17 to 32 of 40 and their last 40 units of time")  # fmt: skip
    assert [row.split()[1] for row in rows] == [str(k) for k in range(17, 33)]
    assert {len(row.split()) for row in rows} == {2 + 40}
    assert len(str(caught.value)) < 5_000


@pytest.mark.parametrize("one_at_a_time", [False, True])
def test_a_big_schedule_is_validated_at_once(one_at_a_time):
    """Within a bound on processor time, which does not count what else the machine does."""
    schedule = fill_drain(128, 512, "always")
    if one_at_a_time:
        schedule = [[Action(kind, i) for i in range(512) for kind in "FRB"] for _ in range(128)]
    start = time.process_time()
    validate(schedule, 512)
    assert time.process_time() - start < 4


def test_an_evaluation_has_no_backward():
    with pytest.raises(SettingError, match="in an evaluation"):
        validate(parse(["F0 B0"]), 1, train=False)


@pytest.mark.parametrize("text", ["", "F", "X3", "F-1", "F3 ", "f3"])
def test_what_is_no_action_is_refused(text):
    with pytest.raises(SettingError, match="no action"):
        Action.parse(text)
