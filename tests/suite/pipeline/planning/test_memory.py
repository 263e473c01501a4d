"""Bytes of a stage: schedules counted by hand, fields of cells, and the closed form that cuts a model."""

from dataclasses import fields, replace
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from suite.pipeline.planning.costs import LayerCost
from suite.pipeline.planning.memory import UNCOUNTED_BYTES, MemoryModel, bytes_per_parameter
from suite.pipeline.planning.stage_memory import CellMemory, InFlightPeaks, peak_bytes
from suite.pipeline.schedule.action import virtual_stages_of
from suite.pipeline.schedule.config import ScheduleConfig
from suite.pipeline.schedule.flow_control import flow_control
from suite.pipeline.schedule.remat import UNLIMITED
from suite.settings import OptimizerSettings
from tests.suite.pipeline.schedule_helpers import cell_memory, fill_drain, in_flight

unhurried = settings(deadline=None)
REMATS = ["always", "except_last", "never"]
ALONE = CellMemory(
    fixed_bytes=10_000,
    input_bytes=10,
    activation_bytes=100,
    forward_peak_bytes=1,
    graph_peak_bytes=150,
    backward_peak_bytes=60,
    update_peak_bytes=0,
    sent_activation_bytes=0,
    received_gradient_bytes=0,
    sent_gradient_bytes=0,
)
BETWEEN = replace(ALONE, sent_activation_bytes=1_000, received_gradient_bytes=10_000, sent_gradient_bytes=100_000)

amounts = st.integers(0, 60)
remats = st.sampled_from(REMATS)


def cost(
    parameters=0, boundary_bytes=0, gradient_bytes=0, activation_bytes=0, forward=0, graph=0, backward=0, update=0
):
    sizes = parameters, boundary_bytes, gradient_bytes, activation_bytes, forward, graph, backward, update
    return LayerCost(0.0, 0.0, 0.0, 0.0, *sizes)


@st.composite
def layer_costs(draw):
    """Any numbers, or such as layers have: a gradient for each input at most, a graph no smaller than none."""
    costs = draw(st.lists(st.builds(cost, *[amounts] * 8), min_size=1, max_size=9))
    if draw(st.booleans()):
        costs = [likely(one) for one in costs]
    return costs


def likely(one):
    graph = max(one.graph_peak_bytes, one.forward_peak_bytes, one.activation_bytes)
    return replace(one, gradient_bytes=min(one.gradient_bytes, one.boundary_bytes), graph_peak_bytes=graph)


def peak_of(micro_batches, remat, stage):
    return peak_bytes(fill_drain(1, micro_batches, remat)[0], stage)


@pytest.mark.parametrize(
    ("remat", "micro_batches", "stage", "peak"),
    [
        # F2 30+150, B2 30+100+60, R1 20+150, B1 20+100+60, ...; inputs of two to come stand while F0 runs
        ("except_last", 3, ALONE, 190),
        ("always", 3, ALONE, 190),
        # F2 30+200+150, B2 30+300+60
        ("never", 3, ALONE, 390),
        ("except_last", 3, replace(ALONE, graph_peak_bytes=300), 330),  # F2
        ("always", 3, replace(ALONE, graph_peak_bytes=300), 330),  # R2
        ("never", 3, replace(ALONE, graph_peak_bytes=300), 530),  # F2 30+200+300
        # F1 is the last without a graph: it runs beside its own inputs, those before and the one received ahead
        ("except_last", 3, replace(ALONE, forward_peak_bytes=500), 530),
        ("always", 3, replace(ALONE, forward_peak_bytes=500), 530),
        ("never", 3, replace(ALONE, forward_peak_bytes=500), 390),
        *((remat, 1, ALONE, 170) for remat in REMATS),  # B0 10+100+60
        ("always", 1, replace(ALONE, forward_peak_bytes=500), 510),
        ("except_last", 1, replace(ALONE, forward_peak_bytes=500), 170),
        # M=1: B0 has its own gradient and what F0 sent
        ("always", 1, BETWEEN, 10_000 + 1_000 + 170),
        # M=3: B0 has its gradient and of the last four sent two forward (F1, F2) and two back (B2, B1): 10+100+60
        ("except_last", 3, BETWEEN, 10_000 + 2 * 1_000 + 2 * 100_000 + 170),
        # without gradients to send back B2 is the peak: its gradient, two ahead, three sent forward, 30+100+60
        ("except_last", 3, replace(BETWEEN, sent_gradient_bytes=0), 3 * 10_000 + 3 * 1_000 + 190),
        # of many only the last four: B7 has 80+100+60
        ("except_last", 8, replace(BETWEEN, sent_gradient_bytes=0), 3 * 10_000 + 4 * 1_000 + 240),
        # with them it is B3, the first with four sent back before it: 40+100+60
        ("except_last", 8, BETWEEN, 3 * 10_000 + 4 * 100_000 + 200),
    ],
)
def test_a_walk_counted_by_hand(remat, micro_batches, stage, peak):
    assert peak_of(micro_batches, remat, stage) == 10_000 + peak
    assert peak_of(micro_batches, remat, replace(stage, update_peak_bytes=peak)) == 10_000 + peak
    assert peak_of(micro_batches, remat, replace(stage, update_peak_bytes=peak + 1)) == 10_000 + peak + 1


def test_gradients_stand_from_the_first_backward_on():
    """100 of 10,000 fixed bytes are gradients. Of three layers the last makes its 60 first, while 40 bytes of
    activations are still there."""
    stage = replace(ALONE, forward_peak_bytes=500, gradient_bytes=100, made_gradient_bytes=70)
    assert peak_of(3, "always", stage) == 10_000 - 100 + 530  # F1, as without gradients
    assert peak_of(3, "never", replace(stage, backward_peak_bytes=100)) == 10_000 - 100 + 30 + 300 + 100 + 70  # B2
    late = replace(stage, forward_peak_bytes=0, made_gradient_bytes=0, backward_peak_bytes=60)
    assert peak_of(3, "always", late) == 10_000 + 20 + 100 + 60  # B1, where all are there; B2 has one input more
    assert peak_of(1, "always", replace(late, update_peak_bytes=200)) == 10_000 + 200


def test_what_a_first_backward_makes_is_counted_layer_by_layer():
    """``THREE`` are layers of 10, 20 and 30 parameters; a gradient has 4 bytes a parameter."""
    sizes = MemoryModel(THREE, in_flight(4, "except_last"), 16.0, 0, 4)
    memory = cell_memory(sizes, 0, 3)
    assert memory.gradient_bytes == 4 * 60
    # a backward needs 300+50+70 in the middle layer with 200 of gradients, 310+12 in the last with 120, 100+30+50 in
    # the first with 240; without gradients the middle one is the peak, 420
    assert memory.made_gradient_bytes == max(420 + 200, 322 + 120, 180 + 240) - 420
    assert cell_memory(MemoryModel(THREE, in_flight(4, "except_last"), 16.0), 0, 3).gradient_bytes == 0


@unhurried
@given(layer_costs(), st.integers(1, 9), remats)
def test_counting_gradients_when_they_are_made_never_adds_bytes(costs, micro_batches, remat):
    plain, exact = (MemoryModel(costs, in_flight(micro_batches, remat), 8.0, 0, size) for size in (0, 4))
    for begin in range(len(costs)):
        for end in range(begin + 1, len(costs) + 1):
            peaks = [peak_of(micro_batches, remat, cell_memory(sizes, begin, end)) for sizes in (plain, exact)]
            assert peaks[1] <= peaks[0]
            assert peaks[1] <= exact.peak_upper_bound(begin, end)


def test_inputs_stand_for_every_micro_batch_activations_for_one():
    """Section 2.3 of the paper: N + L/K * N/M."""
    peaks = [peak_of(micro_batches, "except_last", ALONE) for micro_batches in range(2, 20)]
    assert [more - fewer for fewer, more in pairwise(peaks)] == [10] * 17
    kept = [peak_of(micro_batches, "never", ALONE) for micro_batches in range(2, 20)]
    assert [more - fewer for fewer, more in pairwise(kept)] == [110] * 17


@unhurried
@given(st.builds(CellMemory, *[amounts] * 10), st.integers(1, 9), remats, st.data())
def test_more_bytes_of_anything_never_lower_the_peak(stage, micro_batches, remat, data):
    """More of the fixed bytes that are gradients are not more bytes."""
    names = [field.name for field in fields(CellMemory) if field.name != "gradient_bytes"]
    name = data.draw(st.sampled_from(names))
    more = replace(stage, **{name: getattr(stage, name) + data.draw(amounts)})
    assert peak_of(micro_batches, remat, more) >= peak_of(micro_batches, remat, stage)


THREE = [
    cost(
        parameters=10,
        boundary_bytes=4,
        gradient_bytes=0,
        activation_bytes=100,
        forward=110,
        graph=120,
        backward=50,
        update=7,
    ),
    cost(
        parameters=20,
        boundary_bytes=40,
        gradient_bytes=30,
        activation_bytes=200,
        forward=90,
        graph=260,
        backward=70,
        update=9,
    ),
    cost(
        parameters=30,
        boundary_bytes=50,
        gradient_bytes=50,
        activation_bytes=10,
        forward=150,
        graph=15,
        backward=12,
        update=5,
    ),
]


@pytest.mark.parametrize(
    ("begin", "end", "parameters", "numbers"),
    [
        # inputs, activations, forward, graph, backward, update, leaving, coming back, sent back
        # forward: a later layer's inputs stand beside it, 150+50; graph: 100+260; backward: 300+50+70 less 310,
        # but the gradient that the last layer is given has come back, so it is not among the cell's own
        (0, 3, 60, (4, 310, 200, 360, 110, 9, 0, 0, 0)),
        (1, 3, 50, (40, 210, 200, 260, 110, 9, 0, 0, 30)),
        (0, 2, 30, (4, 300, 130, 360, 70, 9, 50, 50, 0)),
        (0, 1, 10, (4, 100, 110, 120, 50, 7, 40, 30, 0)),
        (1, 2, 20, (40, 200, 90, 260, 70, 9, 50, 50, 30)),
        (2, 3, 30, (50, 10, 150, 15, 12, 5, 0, 0, 50)),
    ],
)
def test_a_cells_bytes_by_hand(begin, end, parameters, numbers):
    sizes = MemoryModel(THREE, in_flight(4, "except_last"), bytes_per_parameter=16.0, process_bytes=1_000)
    assert cell_memory(sizes, begin, end) == CellMemory(16 * parameters + 1_000 + UNCOUNTED_BYTES, *numbers)


def test_of_frozen_values_only_the_weights_stand():
    some = [replace(THREE[0], frozen=10), replace(THREE[1], frozen=5), THREE[2]]
    sizes, plain = (
        MemoryModel(c, in_flight(4, "except_last"), bytes_per_parameter=16.0, process_bytes=1_000)
        for c in (some, THREE)
    )
    for begin, end, frozen in ((0, 3, 15), (0, 1, 10), (1, 2, 5), (2, 3, 0)):
        assert (
            cell_memory(sizes, begin, end).fixed_bytes == cell_memory(plain, begin, end).fixed_bytes - (16 - 4) * frozen
        )
        assert sizes.peak_upper_bound(begin, end) == plain.peak_upper_bound(begin, end) - (16 - 4) * frozen


def test_shares_of_a_byte_round_up():
    sizes = MemoryModel([cost(parameters=3)], in_flight(1, "always"), bytes_per_parameter=8.0 + 16 / 3)
    stage = cell_memory(sizes, 0, 1)
    assert stage.fixed_bytes == 40 + UNCOUNTED_BYTES
    sizes = MemoryModel([cost(parameters=1)], in_flight(1, "always"), bytes_per_parameter=8.5)
    assert cell_memory(sizes, 0, 1).fixed_bytes == 9 + UNCOUNTED_BYTES


@unhurried
@given(layer_costs())
def test_a_cells_bytes_are_those_of_its_layers_one_after_the_other(costs):
    sizes = MemoryModel(costs, in_flight(4, "always"), bytes_per_parameter=16.0)
    edges = [*((one.boundary_bytes, one.gradient_bytes) for one in costs), (0, 0)]
    for begin in range(len(costs)):
        alive = forward = graph = before = 0
        for end in range(begin + 1, len(costs) + 1):
            layer = costs[end - 1]
            forward = max(forward, layer.forward_peak_bytes + (layer.boundary_bytes if end - 1 > begin else 0))
            graph = max(graph, alive + layer.graph_peak_bytes)
            alive += layer.activation_bytes
            backward = max(before, alive + layer.backward_peak_bytes)
            before = max(before, alive + edges[end][1] + layer.backward_peak_bytes)
            assert cell_memory(sizes, begin, end) == CellMemory(
                fixed_bytes=16 * sum(one.parameters for one in costs[begin:end]) + UNCOUNTED_BYTES,
                input_bytes=edges[begin][0],
                activation_bytes=alive,
                forward_peak_bytes=forward,
                graph_peak_bytes=graph,
                backward_peak_bytes=backward - alive,
                update_peak_bytes=max(one.update_peak_bytes for one in costs[begin:end]),
                sent_activation_bytes=edges[end][0],
                received_gradient_bytes=edges[end][1],
                sent_gradient_bytes=edges[begin][1] if begin else 0,
            )


def cells_of(costs):
    return [(begin, end) for begin in range(len(costs)) for end in range(begin + 1, len(costs) + 1)]


@settings(unhurried, max_examples=200)
@given(layer_costs(), st.integers(1, 9), remats)
@example(
    [cost(), cost(gradient_bytes=1), cost(boundary_bytes=1)], 2, "always"
)  # B0 may find F0, F1 and B1 still unsent
def test_the_closed_form_is_never_below_the_walk(costs, micro_batches, remat):
    sizes = MemoryModel(costs, in_flight(micro_batches, remat), bytes_per_parameter=1.0)
    for begin, end in cells_of(costs):
        assert sizes.peak_upper_bound(begin, end) >= peak_of(micro_batches, remat, cell_memory(sizes, begin, end))
        assert end == len(costs) or sizes.peak_upper_bound(begin, end) <= sizes.peak_upper_bound(begin, end + 1)


@pytest.mark.slow
@settings(unhurried, max_examples=30)
@given(
    layer_costs(),
    st.integers(1, 9),
    st.sampled_from([2, 3, 4, 9]),
    st.sampled_from(["1f1b", "zero_bubble", "interleaved"]),
    st.sampled_from([1, 2]),
    st.sampled_from([0, 1, 2, UNLIMITED]),
    st.sampled_from(["gloo", "nccl"]),
)
@example(
    [cost(), cost(gradient_bytes=1), cost(boundary_bytes=1)], 1, 2, "zero_bubble", 1, 0, "gloo"
)  # at W0 both F0 and B0 may be unsent
@example([cost(), cost(gradient_bytes=1), cost(boundary_bytes=1)], 2, 2, "zero_bubble", 1, 0, "gloo")
@example(
    [cost(boundary_bytes=49, activation_bytes=32, forward=52)], 4, 9, "interleaved", 1, 1, "gloo"
)  # F1 finds the graph of F0 kept
def test_nor_is_it_with_other_schedules(costs, micro_batches, stages, name, virtual_stages, graphs, transport):
    """For any cell of theirs, whichever layers it holds."""
    costs = [replace(one, deferred_bytes=one.activation_bytes // 2) for one in costs]
    schedule = ScheduleConfig(name, (graphs,), {"1f1b": 1, "interleaved": 2}.get(name, virtual_stages)).actions(
        stages, micro_batches
    )
    sizes = MemoryModel(costs, InFlightPeaks.of(schedule, micro_batches, transport), bytes_per_parameter=1.0)
    flow = flow_control(transport, stages, virtual_stages_of(schedule))
    for begin, end in cells_of(costs):
        for actions in schedule:
            for virtual_stage in range(virtual_stages_of(schedule)):
                mine = [replace(action, virtual_stage=0) for action in actions if action.virtual_stage == virtual_stage]
                peak = peak_bytes(mine, cell_memory(sizes, begin, end), flow=flow)
                assert sizes.peak_upper_bound(begin, end) >= peak


@pytest.mark.slow
@settings(unhurried, max_examples=200)
@given(layer_costs(), st.integers(1, 9), remats)
def test_the_closed_form_is_above_the_walk_by_messages_alone(costs, micro_batches, remat):
    """By one message each way, when the schedule too takes the largest boundaries inside the cell for its own."""
    costs = [likely(one) for one in costs]
    sizes = MemoryModel(costs, in_flight(micro_batches, remat), bytes_per_parameter=1.0)
    edges = [*costs[1:], cost()]
    for begin, end in cells_of(costs):
        leaving = max(edge.boundary_bytes for edge in edges[begin:end])
        coming_back = max(edge.gradient_bytes for edge in edges[begin:end])
        stage = replace(
            cell_memory(sizes, begin, end), sent_activation_bytes=leaving, received_gradient_bytes=coming_back
        )
        if (
            stage.forward_peak_bytes <= stage.graph_peak_bytes
        ):  # or forwards decide, and the last ones differ with remat
            assert sizes.peak_upper_bound(begin, end) <= peak_of(micro_batches, remat, stage) + leaving + coming_back


@settings(unhurried, max_examples=200)
@given(layer_costs(), st.integers(1, 9), remats)
def test_without_messages_the_closed_form_is_the_walk(costs, micro_batches, remat):
    costs = [
        replace(likely(one), gradient_bytes=0, boundary_bytes=0 if at else one.boundary_bytes)
        for at, one in enumerate(costs)
    ]
    sizes = MemoryModel(costs, in_flight(micro_batches, remat), bytes_per_parameter=1.0)
    for begin, end in cells_of(costs):
        assert sizes.peak_upper_bound(begin, end) == peak_of(micro_batches, remat, cell_memory(sizes, begin, end))


@settings(unhurried, max_examples=200)
@given(layer_costs(), st.integers(1, 9), remats, st.integers(0, 1_500))
def test_reach_is_the_longest_cell_that_fits_and_all_shorter_ones_fit(costs, micro_batches, remat, room):
    sizes = MemoryModel(costs, in_flight(micro_batches, remat), bytes_per_parameter=1.0)
    limit = UNCOUNTED_BYTES + room
    furthest_end = sizes.furthest_end(limit)
    layers = len(costs)
    for begin in range(layers):
        fitting = [end for end in range(begin + 1, layers + 1) if sizes.peak_upper_bound(begin, end) <= limit]
        assert furthest_end[begin] == max(fitting, default=begin)
        for end in range(begin + 1, furthest_end[begin] + 1):
            assert peak_of(micro_batches, remat, cell_memory(sizes, begin, end)) <= limit


def test_reach_by_hand():
    """Of weights alone: cells of at most 5."""
    costs = [cost(parameters=count) for count in (1, 1, 3, 6, 4, 1)]
    sizes = MemoryModel(costs, in_flight(4, "except_last"), bytes_per_parameter=1.0)
    assert sizes.furthest_end(UNCOUNTED_BYTES + 5) == [3, 3, 3, 3, 6, 6]
    assert sizes.furthest_end(UNCOUNTED_BYTES + 16) == [6] * 6
    assert sizes.furthest_end(UNCOUNTED_BYTES) == [0, 1, 2, 3, 4, 5]


def test_reach_counts_the_largest_boundary_inside():
    """The cell of all three is sent no gradient; for what reach says of its parts, it is counted as if it were."""
    costs = [cost(), cost(gradient_bytes=100), cost()]
    sizes = MemoryModel(costs, in_flight(1, "always"), bytes_per_parameter=1.0)
    assert [peak_of(1, "always", cell_memory(sizes, 0, end)) - UNCOUNTED_BYTES for end in (1, 2, 3)] == [100, 100, 100]
    assert [sizes.peak_upper_bound(0, end) - UNCOUNTED_BYTES for end in (1, 2, 3)] == [100, 200, 200]
    assert sizes.furthest_end(UNCOUNTED_BYTES + 199) == [1, 3, 3]
    assert sizes.furthest_end(UNCOUNTED_BYTES + 200) == [3, 3, 3]


@pytest.mark.parametrize(
    ("name", "replicas", "expected"),
    [
        ("adamw", 1, 16), ("adamw", 2, 16), ("adamw", 4, 12), ("adamw", 16, 9),
        ("adafactor", 1, 8), ("adafactor", 4, 8), ("rmsprop", 1, 16), ("rmsprop", 4, 12),
        ("sgd", 1, 12), ("sgd", 4, 11),
    ],
)  # fmt: skip
def test_bytes_that_stand_for_a_parameter(name, replicas, expected):
    assert bytes_per_parameter(OptimizerSettings(name=name), replicas) == expected


@pytest.mark.parametrize("replicas", [1, 4])
def test_without_momentum_sgd_keeps_no_state(replicas):
    assert bytes_per_parameter(OptimizerSettings(name="sgd", beta1=0), replicas) == 8
