"""Recomputation against all choices there are, and what it means for fill-drain."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from suite.pipeline.schedule import remat
from suite.pipeline.schedule.action import Action
from suite.pipeline.schedule.config import ScheduleConfig
from suite.pipeline.schedule.remat import UNLIMITED, with_recomputes


def text(actions):
    return " ".join(map(str, actions))


def test_in_fill_drain_the_last_ones_are_kept_as_in_the_picture():
    heads, rows = (line.split("   ") for line in remat.__doc__.splitlines()[2:4])
    limits, drains = ([part.strip() for part in parts if part.strip()] for parts in (heads[1:], rows[1:]))
    assert [limit.split()[0] for limit in limits][-4:] == ["0", "1", "2", "M"]
    for graphs, drain in zip((0, 1, 2, 4), drains[-4:], strict=True):
        (actions,) = ScheduleConfig("fill_drain", (graphs,)).actions(1, 4)
        assert text(actions[4:]).startswith(drain.removesuffix("..").strip())


def test_cells_of_one_stage_have_dials_of_their_own():
    schedule = ScheduleConfig("interleaved", (UNLIMITED, UNLIMITED, 0, 0), virtual_stages=2).actions(2, 4)
    for actions in schedule:
        assert [a for a in actions if a.kind == "R" and a.virtual_stage == 0] == []
        assert sum(a.kind == "R" for a in actions) == 4


def standing(actions, kept):
    """Returns the most graphs that stand at once when these micro-batches are kept and all others recomputed."""
    graphs = most = 0
    for action in actions:
        if action.kind == "F":
            graphs += action.micro_batch in kept
        elif action.kind == "B":
            graphs += action.micro_batch not in kept
            most = max(most, graphs)
            graphs -= 1
        most = max(most, graphs)
    return most


@st.composite
def action_lists(draw):
    """Forwards in any order, each with its backward somewhere behind it."""
    count = draw(st.integers(1, 6))
    actions = []
    for i in draw(st.permutations(range(count))):
        begin = draw(st.integers(0, len(actions)))
        actions.insert(begin, Action("F", i))
        actions.insert(draw(st.integers(begin + 1, len(actions))), Action("B", i))
    return actions, count


@given(action_lists(), st.integers(1, 7))
def test_no_choice_keeps_more_within_the_dial(case, graphs):
    actions, count = case
    recomputing = with_recomputes(actions, [graphs])
    kept = set(range(count)) - {a.micro_batch for a in recomputing if a.kind == "R"}
    assert standing(actions, kept) <= graphs
    best = max(
        len(choice)
        for size in range(count + 1)
        for choice in itertools.combinations(range(count), size)
        if standing(actions, set(choice)) <= graphs
    )
    assert len(kept) == best


@given(action_lists(), st.integers(0, 7))
def test_a_recompute_stands_right_before_its_backward_and_nothing_else_moves(case, graphs):
    actions, _ = case
    recomputing = with_recomputes(actions, [graphs])
    assert [a for a in recomputing if a.kind != "R"] == actions
    for at, action in enumerate(recomputing):
        if action.kind == "R":
            assert recomputing[at + 1] == Action("B", action.micro_batch)
