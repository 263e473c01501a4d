"""Skips in a plan: what passes each cut, what goes where, and that no bound of bytes is below what it bounds."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from suite.pipeline.model.cells import CellPlacement
from suite.pipeline.planning.costs import LayerCost, MessageCost, SkipCost, SkipInput, message_costs, skip_costs
from suite.pipeline.planning.memory import MemoryModel
from suite.pipeline.planning.partition import cell_ranges
from suite.pipeline.planning.stage_memory import InFlightPeaks, peak_bytes
from suite.pipeline.schedule.action import Action
from suite.pipeline.schedule.config import ScheduleConfig
from suite.pipeline.schedule.flow_control import flow_control
from suite.pipeline.schedule.remat import UNLIMITED
from tests.suite.pipeline.random_pipelines import draw_cell_to_stage, draw_rows
from tests.suite.pipeline.schedule_helpers import fill_drain, in_flight

PLAIN = LayerCost(*[1.0] * 4, *[0] * 8)


def layer(boundary, gradient, *takes):
    return replace(PLAIN, boundary_bytes=boundary, gradient_bytes=gradient, skip_inputs=takes)


# layer 1 gives its own output (40 bytes) to layer 3; layer 0 gives 7 bytes to layer 4
SKIPPING = [
    layer(8, 0),
    layer(20 + 7, 20),  # layer 0's output, and its skip beside it
    layer(40 + 7, 40),  # layer 1's output is its skip as well
    layer(60 + 7 + 40, 60 + 40),
    layer(80 + 7, 80),
]
SKIPPING[3] = replace(SKIPPING[3], skip_inputs=(SkipInput(2, 40, 40, same_as_output=True),))
SKIPPING[4] = replace(SKIPPING[4], skip_inputs=(SkipInput(4, 7, 0, same_as_output=False),))


def test_what_passes_each_front():
    short, long = SkipCost(1, 3, 40, 40, True), SkipCost(0, 4, 7, 0, False)
    assert skip_costs(SKIPPING) == [[], [long], [short, long], [short, long], [long], []]
    assert not short.own_tensor_at(2)
    assert short.own_tensor_at(3)


def test_messages_go_straight_to_their_stage_and_hold_each_tensor_once():
    alone = cell_ranges((1, 1, 1, 1, 1), 5)
    assert message_costs(SKIPPING, alone, 0) == [MessageCost(1, 20, 20), MessageCost(4, 7, 0)]
    assert message_costs(SKIPPING, alone, 1) == [MessageCost(2, 40, 40), MessageCost(3, 40, 40)]
    assert message_costs(SKIPPING, alone, 2) == [MessageCost(3, 60, 60)]
    assert message_costs(SKIPPING, alone, 3) == [MessageCost(4, 80, 80)]
    assert message_costs(SKIPPING, alone, 4) == []
    # layers 2 and 3 on one stage: what layer 2 gets is also what layer 3 takes
    together = cell_ranges((2, 2, 1), 5)
    assert message_costs(SKIPPING, together, 0) == [MessageCost(1, 40, 40), MessageCost(2, 7, 0)]
    assert message_costs(SKIPPING, cell_ranges((3, 2), 5), 0) == [MessageCost(1, 60 + 40 + 7, 100)]


@st.composite
def skipping_costs(draw):
    """Layers with any bytes, whose fronts hold what their skips say."""
    count = draw(st.integers(2, 7))
    size = st.integers(0, 60)
    outputs = [draw(size) for _ in range(count)]  # of the layer before: outputs[0] is the model's input
    popped: list[list[SkipInput]] = [[] for _ in range(count)]
    for target in range(1, count):
        for source in range(target):
            if draw(st.integers(0, 3)) == 0 and target - source > 1:
                same = draw(st.booleans())
                width = outputs[source + 1] if same else draw(size)
                popped[target].append(SkipInput(target - source, width, width, same))
    costs = [
        LayerCost(*[1.0] * 4, draw(size), 0, 0, *[draw(size) for _ in range(5)], skip_inputs=tuple(popped[at]))
        for at in range(count)
    ]
    passing = skip_costs(costs)
    return [
        replace(
            cost,
            boundary_bytes=outputs[at] + sum(skip.bytes for skip in passing[at] if skip.own_tensor_at(at)),
            gradient_bytes=0
            if at == 0
            else outputs[at] + sum(skip.gradient_bytes for skip in passing[at] if skip.own_tensor_at(at)),
        )
        for at, cost in enumerate(costs)
    ]


@settings(deadline=None)
@given(skipping_costs(), st.integers(1, 6), st.sampled_from(["always", "except_last", "never"]), st.data())
def test_no_cell_needs_more_than_its_bound_whatever_the_other_cells_are(costs, micro_batches, remat, data):
    stages = data.draw(st.integers(1, len(costs)))
    cuts = sorted(data.draw(st.permutations(range(1, len(costs))))[: stages - 1])
    edges = [0, *cuts, len(costs)]
    cells = [range(begin, end) for begin, end in pairwise(edges)]
    sizes = MemoryModel(costs, in_flight(micro_batches, remat), 8.0)
    for k, (cell, actions) in enumerate(zip(cells, fill_drain(stages, micro_batches, remat), strict=True)):
        assert sizes.peak_upper_bound(cell[0], cell[-1] + 1) >= peak_bytes(actions, sizes.in_partition(cells, k))


@settings(deadline=None)
@given(
    skipping_costs(),
    st.integers(1, 9),
    st.sampled_from(["interleaved", "zero_bubble", "csv"]),
    st.sampled_from([0, 1, UNLIMITED]),
    st.sampled_from(["gloo", "nccl"]),
    st.randoms(use_true_random=False),
)
def test_nor_does_a_cell_of_a_stage_of_several(costs, micro_batches, name, graphs, transport, dice):
    """Stages are two, or three where the layers are enough: a skip may stay on one of them, and with a file's placement
    of the cells any tensor."""
    stages = 3 if len(costs) >= 6 else 2
    virtual_stages = len(costs) // stages
    if virtual_stages < 2:
        return
    cells = cell_ranges((*[1] * (stages * virtual_stages - 1), len(costs) - stages * virtual_stages + 1), len(costs))
    rows = draw_rows(dice, draw_cell_to_stage(dice, stages, virtual_stages), micro_batches) if name == "csv" else ()
    config = ScheduleConfig(name, (graphs,), virtual_stages, rows)
    schedule, placement = config.actions(stages, micro_batches), config.placement(stages)
    sizes = MemoryModel(costs, InFlightPeaks.of(schedule, micro_batches, transport, placement.cell_to_stage), 8.0)
    flow = flow_control(transport, stages, virtual_stages)
    for at, cell in enumerate(cells):
        own, virtual_stage = schedule[placement.stage_of(at)], placement.virtual_stage_of(at)
        mine = [replace(action, virtual_stage=0) for action in own if action.virtual_stage == virtual_stage]
        peak = peak_bytes(mine, sizes.in_partition(cells, at), flow=flow)
        assert sizes.peak_upper_bound(cell[0], cell[-1] + 1) >= peak


@pytest.mark.parametrize(("micro_batches", "order", "more"), [(5, "FRIW", 1), (1, "FRB", 0)])
def test_what_waits_for_a_cell_of_the_same_stage_does_so_beside_what_is_sent_to_another(micro_batches, order, more):
    """Cells 0 and 1 are on one stage. Layer 1 gives a byte to layer 4; the gradient of its input waits for cell 0."""
    costs = [layer(0, 0), layer(1, 1), layer(1, 1), layer(1, 1), layer(1, 1, SkipInput(3, 1, 1, same_as_output=False))]
    actions = [Action(kind, at) for at in range(micro_batches) for kind in order]
    flow = flow_control("nccl", 2, 2)
    in_flight = InFlightPeaks(
        micro_batches, inputs=1, graphs=1, deferred=more, fill_then_drain=not more, flow=flow,
        placement=CellPlacement(2, (0, 0, 1, 1)), waiting={(0, 1): (1, 1), (2, 3): (1, 1)},
    )  # fmt: skip
    sizes = MemoryModel(costs, in_flight, 8.0)
    peak = peak_bytes(actions, sizes.in_partition(cell_ranges((1, 1, 1, 2), 5), 1), flow=flow)
    assert sizes.peak_upper_bound(1, 2) >= peak


def test_a_skip_that_stays_on_a_stage_is_held_of_a_group_at_most():
    """K = 4, two cells a stage: cell 0 gives 7 bytes to cell 4 and 9 to cell 5."""
    takes = {4: SkipInput(4, 7, 7, same_as_output=False), 5: SkipInput(5, 9, 9, same_as_output=False)}
    costs = [layer(0, 0, *[takes[at]] if at in takes else []) for at in range(8)]
    for target, one in ((4, takes[4]), (5, takes[5])):
        for at in range(target - one.span + 1, target + 1):
            costs[at] = replace(
                costs[at],
                boundary_bytes=costs[at].boundary_bytes + one.bytes,
                gradient_bytes=costs[at].gradient_bytes + one.gradient_bytes,
            )
    schedule = ScheduleConfig("interleaved", (1,), 2).actions(4, 12)
    sizes, cells = MemoryModel(costs, InFlightPeaks.of(schedule, 12), 8.0), cell_ranges((1,) * 8, 8)
    assert flow_control("gloo", 4, 2).max_inflight_sends == 4
    source, near, far = (sizes.in_partition(cells, at) for at in (0, 4, 5))
    # of the skip that stays two wait beside the two that count as expected; of the other, eight may be under way, of
    # which the first four count with the neighbour's
    assert source.far_message_bytes == (4 - 2) * 7 + (8 - 4) * 9
    assert (near.far_message_bytes, far.far_message_bytes) == ((4 - 2) * 7, (8 - 4) * 9)
    assert (source.sent_activation_bytes, near.input_bytes, near.sent_gradient_bytes) == (9, 7, 0)


@settings(deadline=None)
@given(skipping_costs(), st.data())
def test_what_stages_send_each_other_is_what_they_get(costs, data):
    stages = data.draw(st.integers(2, len(costs)))
    cuts = sorted(data.draw(st.permutations(range(1, len(costs))))[: stages - 1])
    edges = [0, *cuts, len(costs)]
    cells = [range(begin, end) for begin, end in pairwise(edges)]
    sizes = MemoryModel(costs, in_flight(1, "never"), 8.0)
    sent = {(k, one.to): one for k in range(stages) for one in message_costs(costs, cells, k)}
    for k in range(1, stages):
        assert (
            sum(one.activation_bytes for (_, to), one in sent.items() if to == k)
            == sizes.in_partition(cells, k).input_bytes
        )
        assert (
            sum(one.gradient_bytes for (_, to), one in sent.items() if to == k)
            == sizes.in_partition(cells, k).sent_gradient_bytes
        )
    for k in range(stages - 1):
        assert (
            sum(one.gradient_bytes for (source, _), one in sent.items() if source == k)
            == sizes.in_partition(cells, k).received_gradient_bytes
        )
