"""Simulated steps: drawn by hand, against closed forms, and every rule checked again on the spans."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from suite.errors import SettingError
from suite.pipeline.planning.costs import MessageCost
from suite.pipeline.planning.simulate import CellCost, Link, Links, simulate
from suite.pipeline.schedule.config import ScheduleConfig
from suite.pipeline.schedule.flow_control import flow_control
from suite.pipeline.schedule.remat import UNLIMITED
from tests.suite.pipeline.schedule_helpers import fill_drain, parse

REMATS = ["always", "except_last", "never"]
EQUAL = CellCost(forward_s=1, recompute_s=1, backward_s=2)

# whole numbers are exact in float64, so sums and maxima of them can be compared with ==
times = st.integers(0, 50)
sizes = st.integers(0, 40)
stage_costs = st.builds(CellCost, times, times, times, times, sizes, sizes)
schedule_configs = st.sampled_from(
    [
        ScheduleConfig(name, (graphs,), virtual_stages)
        for name, virtual_stages in (("1f1b", 1), ("zero_bubble", 1), ("interleaved", 3), ("zero_bubble", 2))
        for graphs in (0, 1, 2, UNLIMITED)
    ]
)
links = st.builds(Link, st.integers(0, 9), st.sampled_from([0.5, 1.0, 4.0, float("inf")]))


@st.composite
def steps(draw):
    """(schedule, stages, link)."""
    stages = draw(st.lists(stage_costs, min_size=1, max_size=6))
    micro_batches = draw(st.integers(1, 8))
    if draw(st.integers(0, 5)) == 0:
        return ScheduleConfig().forward_only(len(stages), micro_batches), stages, draw(links)
    schedule_config = draw(schedule_configs)
    if len(stages) > 1 and draw(st.booleans()):
        cells = [
            replace(draw(stage_costs), update_s=0) for _ in range(len(stages) * (schedule_config.virtual_stages - 1))
        ]
        cells = [replace(one, weight_grad_s=one.backward_s // 3, split_s=2) for one in (*stages, *cells)]
        return schedule_config.actions(len(stages), micro_batches), cells, draw(links)
    schedule = fill_drain(len(stages), micro_batches, draw(st.sampled_from(REMATS)))
    if draw(st.booleans()):  # one micro-batch after the other is a schedule too
        schedule = [sorted(actions, key=lambda action: action.micro_batch) for actions in schedule]
    return schedule, stages, draw(links)


def drawn(timeline):
    return [" ".join(f"{span}:{span.start:g}-{span.end:g}" for span in row) for row in timeline.rows]


def test_what_messages_keep_a_stage_busy_with_is_part_of_its_forward_and_its_backward():
    messages = replace(EQUAL, forward_messages_s=0.5, backward_messages_s=0.25)
    assert drawn(simulate(fill_drain(2, 2, "except_last"), [messages, EQUAL])) == [
        "F0:0-1.5 F1:1.5-3 B1:6-8.25 R0:8.25-9.25 B0:9.25-11.5",
        "F0:1.5-2.5 F1:3-4 B1:4-6 R0:6-7 B0:7-9",
    ]


def test_an_update_waits_until_the_workers_agree():
    timeline = simulate(fill_drain(2, 1, "never"), [replace(EQUAL, update_s=1)] * 2, norm_all_reduce_s=0.5)
    assert [row[-1].start for row in timeline.rows] == [6.5, 6.5]


def test_a_link_delays_by_latency_and_size_and_is_kept_by_the_bytes_alone():
    # forward 20/10 + 0.5 = 2.5, back 5/10 + 0.5 = 1; F1's message is ready at 2, its link is free at 3
    stages = [
        CellCost(1, 1, 2, activation_bytes=20, gradient_bytes=99),
        CellCost(1, 1, 2, activation_bytes=99, gradient_bytes=5),
    ]
    assert drawn(simulate(fill_drain(2, 2, "except_last"), stages, Link(0.5, 10))) == [
        "F0:0-1 F1:1-2 B1:9.5-11.5 R0:11.5-12.5 B0:12.5-14.5",
        "F0:3.5-4.5 F1:5.5-6.5 B1:6.5-8.5 R0:8.5-9.5 B0:9.5-11.5",
    ]


def test_messages_follow_one_another_over_a_long_link_until_no_receive_is_known_to_be_posted():
    """The third waits until the first is taken, at 6, and word of that is back, at 11."""
    first, second = simulate(fill_drain(2, 3, "never"), [EQUAL] * 2, Link(5.0)).rows
    assert [span.start for span in first[:3]] == [0, 1, 2]
    assert [span.start for span in second[:3]] == [6, 7, 16]


def test_each_direction_has_a_link_of_its_own():
    """While F1 is on its slow way to stage 2, B0 goes back from stage 1."""
    stages = [CellCost(1, 1, 1), CellCost(1, 1, 1, activation_bytes=10), CellCost(1, 1, 1)]
    assert drawn(simulate(parse(["F0 F1 B0 B1", "F0 F1 B0 B1", "F0 B0 F1 B1"]), stages, Link(0, 1))) == [
        "F0:0-1 F1:1-2 B0:15-16 B1:25-26",
        "F0:1-2 F1:2-3 B0:14-15 B1:24-25",
        "F0:12-13 B0:13-14 F1:22-23 B1:23-24",
    ]


def check_rules(schedule, cells, link, timeline):
    """Checks every span against the rules, from the spans alone."""
    stages = len(schedule)
    ends = {
        ("B" if span.kind == "I" else span.kind, span.micro_batch, span.virtual_stage * stages + k): span.end
        for k, row in enumerate(timeline.rows)
        for span in row
    }
    for k, (actions, row) in enumerate(zip(schedule, timeline.rows, strict=True)):
        recomputed = {(a.micro_batch, a.virtual_stage) for a in actions if a.kind == "R"}
        assert [str(span) for span in row if span.kind != "U"] == [str(action) for action in actions]
        before = 0.0
        for action, span in zip(actions, row, strict=False):
            at = action.virtual_stage * stages + k
            cell = cells[at]
            first_forward_s = (
                cell.forward_s if (action.micro_batch, action.virtual_stage) in recomputed else cell.recompute_s
            )
            seconds = {
                "F": first_forward_s, "R": cell.recompute_s, "B": cell.backward_s, "W": cell.weight_grad_s,
                "I": cell.backward_s - cell.weight_grad_s + cell.split_s,
            }  # fmt: skip
            assert span.seconds == seconds[action.kind]
            source = at + {"F": -1, "B": 1, "I": 1}.get(action.kind, len(cells))
            there = 0.0
            if 0 <= source < len(cells):
                size = cells[source].activation_bytes if action.kind == "F" else cells[source].gradient_bytes
                there = ends["F" if action.kind == "F" else "B", action.micro_batch, source] + link.seconds(size)
            assert span.start >= before, "two actions at once"
            assert span.start >= there, "begun before its message was there"
            if link == Link():
                assert span.start == max(before, there), "waited for nothing"
            before = span.end


@given(steps())
def test_no_two_actions_at_once_and_none_before_its_message(step):
    schedule, stages, link = step
    for given_link in (link, Link()):
        timeline = simulate(schedule, stages, given_link)
        check_rules(schedule, stages, given_link, timeline)
        done = max(span.end for row in timeline.rows for span in row if span.kind != "U")
        for row, stage in zip(timeline.rows, stages[: len(schedule)], strict=True):
            updates = [(span.start, span.end) for span in row if span.kind == "U"]
            assert updates == ([(done, done + stage.update_s)] if stage.update_s else [])


def test_a_deadlock_names_the_stages_that_wait_and_where():
    schedule = parse(["F0 B0 F1 B1", "F0 F1 B0 B1", "F0 F1 B0 B1"])
    with pytest.raises(SettingError, match="deadlocks: stage 0 at B0, stage 1 at F1, stage 2 at F1 wait"):
        simulate(schedule, [EQUAL] * 3)


def test_a_skip_to_a_far_stage_holds_up_its_forward_and_its_gradient_the_givers_backward():
    """Three stages, one micro-batch; the near messages take nothing, the far one 5 forward and 7 back."""
    costs = [CellCost(1, 1, 2, far_messages=(MessageCost(2, 50, 70),)), CellCost(1, 1, 2), CellCost(1, 1, 2)]
    timeline = simulate(fill_drain(3, 1, "never"), costs, Link(0.0, 10.0))
    spans = [{str(span): (span.start, span.end) for span in row} for row in timeline.rows]
    assert spans[1]["F0"] == (1, 2)
    assert spans[2]["F0"] == (6, 7)  # stage 0 was done at 1, the skip was there at 6
    assert spans[2]["B0"] == (7, 9)
    assert spans[1]["B0"] == (9, 11)
    assert spans[0]["B0"] == (16, 18)  # the near gradient is there at 11, the skip's at 16


def test_a_skip_that_stays_on_a_stage_holds_up_nothing():
    schedule_config = ScheduleConfig("interleaved", (UNLIMITED,), 2)
    plain = [CellCost(1, 1, 2, activation_bytes=10, gradient_bytes=10) for _ in range(4)]
    staying = [replace(plain[0], far_messages=(MessageCost(2, 500, 700),)), *plain[1:]]
    leaving = [replace(plain[0], far_messages=(MessageCost(3, 500, 700),)), *plain[1:]]
    alone, stays, leaves = (
        simulate(schedule_config.actions(2, 4), cells, Link(0.0, 10.0)) for cells in (plain, staying, leaving)
    )
    assert stays == alone
    assert leaves.seconds > alone.seconds + 50


def test_messages_of_a_far_lane_leave_one_after_the_other():
    costs = [CellCost(1, 1, 1, far_messages=(MessageCost(2, 30, 0),)), CellCost(1, 1, 1), CellCost(1, 1, 1)]
    timeline = simulate(fill_drain(3, 3, "never"), costs, Link(0.0, 10.0))
    starts = [span.start for span in timeline.rows[2] if span.kind == "F"]
    assert starts == [4, 7, 10]


def test_only_messages_between_nodes_take_what_the_network_takes():
    cells = [CellCost(1.0, 1.0, 2.0, activation_bytes=10, gradient_bytes=10) for _ in range(4)]
    cells[0] = replace(cells[0], gradient_bytes=0)
    cells[3] = replace(cells[3], activation_bytes=0)
    schedule = ScheduleConfig().actions(4, 1)
    alone = simulate(schedule, cells).seconds
    far = Link(0.5, 10.0)  # 1.5 s for 10 bytes
    for cuts, messages in ((frozenset(), 0), (frozenset({1}), 2), (frozenset({0, 2}), 4)):
        assert simulate(schedule, cells, Links(Link(), far, cuts)).seconds == pytest.approx(alone + 1.5 * messages)


def test_stages_on_either_side_of_a_cut_are_linked_by_the_network():
    links = Links(Link(1.0), Link(2.0), frozenset({1}))
    found = {(one, other): links.between(one, other).latency_s for one in range(4) for other in range(one + 1, 4)}
    assert found == {(0, 1): 1.0, (0, 2): 2.0, (0, 3): 2.0, (1, 2): 2.0, (1, 3): 2.0, (2, 3): 1.0}
    assert links.between(3, 0) == links.between(0, 3)


def test_on_nccl_a_gradient_is_received_once_its_backward_is_next():
    """Stage 0 takes 10 s a forward. The first gradient is ready long before its second forward ends at 20: on gloo it
    has arrived by then, on NCCL its receive is posted at 20, known at 21, and the message arrives at 21 + 3 + 1."""
    schedule = ScheduleConfig("1f1b", (UNLIMITED,)).actions(2, 2)
    cells = [replace(EQUAL, forward_s=10, recompute_s=10, activation_bytes=0), replace(EQUAL, gradient_bytes=3)]
    link = Link(latency_s=1, bytes_per_s=1)
    for transport, start in (("gloo", 20), ("nccl", 25)):
        row = simulate(schedule, cells, link, flow_control(transport, 2, 1)).rows[0]
        assert [span.start for span in row if str(span) == "B0"] == [start]
