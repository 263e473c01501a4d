"""Bytes of a stage: walks counted by hand, fields of cells, and the closed form that cuts a model."""

from dataclasses import fields, replace
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from suite.pipeline.action import turns_of
from suite.pipeline.costs import LayerCost
from suite.pipeline.memory import SUNDRIES, CellBytes, Crowd, StageBytes, bytes_per_parameter, peak_bytes
from suite.pipeline.rebuild import ALL
from suite.pipeline.recipe import Recipe
from suite.pipeline.transport import outstanding
from suite.settings import OptimizerSettings
from tests.pipeline.walks import crowd, fill_drain

unhurried = settings(deadline=None)
REMATS = ["always", "except_last", "never"]
ALONE = StageBytes(
    fixed=10_000, inputs=10, activations=100, forward_peak=1, graph_peak=150, backward_peak=60, update_peak=0,
    leaving=0, coming_back=0, sent_back=0,
)  # fmt: skip
BETWEEN = replace(ALONE, leaving=1_000, coming_back=10_000, sent_back=100_000)

amounts = st.integers(0, 60)
remats = st.sampled_from(REMATS)


def cost(parameters=0, boundary=0, gradient=0, activations=0, forward=0, graph=0, backward=0, update=0):
    return LayerCost(0.0, 0.0, 0.0, 0.0, parameters, boundary, gradient, activations, forward, graph, backward, update)


@st.composite
def layer_costs(draw):
    """Any numbers, or such as layers have: a gradient for each input at most, a graph no smaller than none."""
    costs = draw(st.lists(st.builds(cost, *[amounts] * 8), min_size=1, max_size=9))
    if draw(st.booleans()):
        costs = [likely(one) for one in costs]
    return costs


def likely(one):
    graph = max(one.graph_peak, one.forward_peak, one.activations)
    return replace(one, gradient=min(one.gradient, one.boundary), graph_peak=graph)


def walk(micro_batches, remat, stage):
    return peak_bytes(fill_drain(1, micro_batches, remat)[0], stage)


@pytest.mark.parametrize(
    ("remat", "micro_batches", "stage", "peak"),
    [
        # F2 30+150, B2 30+100+60, R1 20+150, B1 20+100+60, ...; inputs of two to come stand while F0 runs
        ("except_last", 3, ALONE, 190),
        ("always", 3, ALONE, 190),
        # F2 30+200+150, B2 30+300+60
        ("never", 3, ALONE, 390),
        ("except_last", 3, replace(ALONE, graph_peak=300), 330),  # F2
        ("always", 3, replace(ALONE, graph_peak=300), 330),  # R2
        ("never", 3, replace(ALONE, graph_peak=300), 530),  # F2 30+200+300
        # F1 is the last without a graph: it runs beside its own inputs, those before and the one received ahead
        ("except_last", 3, replace(ALONE, forward_peak=500), 530),
        ("always", 3, replace(ALONE, forward_peak=500), 530),
        ("never", 3, replace(ALONE, forward_peak=500), 390),
        *((remat, 1, ALONE, 170) for remat in REMATS),  # B0 10+100+60
        ("always", 1, replace(ALONE, forward_peak=500), 510),
        ("except_last", 1, replace(ALONE, forward_peak=500), 170),
        # M=1: B0 has its own gradient and what F0 sent
        ("always", 1, BETWEEN, 10_000 + 1_000 + 170),
        # M=3: B0 has its gradient and of the last four sent two forward (F1, F2) and two back (B2, B1): 10+100+60
        ("except_last", 3, BETWEEN, 10_000 + 2 * 1_000 + 2 * 100_000 + 170),
        # without gradients to send back B2 is the peak: its gradient, two ahead, three sent forward, 30+100+60
        ("except_last", 3, replace(BETWEEN, sent_back=0), 3 * 10_000 + 3 * 1_000 + 190),
        # of many only the last four: B7 has 80+100+60
        ("except_last", 8, replace(BETWEEN, sent_back=0), 3 * 10_000 + 4 * 1_000 + 240),
        # with them it is B3, the first with four sent back before it: 40+100+60
        ("except_last", 8, BETWEEN, 3 * 10_000 + 4 * 100_000 + 200),
    ],
)
def test_a_walk_counted_by_hand(remat, micro_batches, stage, peak):
    assert walk(micro_batches, remat, stage) == 10_000 + peak
    assert walk(micro_batches, remat, replace(stage, update_peak=peak)) == 10_000 + peak
    assert walk(micro_batches, remat, replace(stage, update_peak=peak + 1)) == 10_000 + peak + 1


def test_inputs_stand_for_every_micro_batch_activations_for_one():
    """Section 2.3 of the paper: N + L/K * N/M."""
    peaks = [walk(micro_batches, "except_last", ALONE) for micro_batches in range(2, 20)]
    assert [more - fewer for fewer, more in pairwise(peaks)] == [10] * 17
    kept = [walk(micro_batches, "never", ALONE) for micro_batches in range(2, 20)]
    assert [more - fewer for fewer, more in pairwise(kept)] == [110] * 17


@unhurried
@given(st.builds(StageBytes, *[amounts] * 10), st.integers(1, 9), remats, st.data())
def test_more_bytes_of_anything_never_lower_the_peak(stage, micro_batches, remat, data):
    name = data.draw(st.sampled_from([field.name for field in fields(StageBytes)]))
    more = replace(stage, **{name: getattr(stage, name) + data.draw(amounts)})
    assert walk(micro_batches, remat, more) >= walk(micro_batches, remat, stage)


THREE = [
    cost(parameters=10, boundary=4, gradient=0, activations=100, forward=110, graph=120, backward=50, update=7),
    cost(parameters=20, boundary=40, gradient=30, activations=200, forward=90, graph=260, backward=70, update=9),
    cost(parameters=30, boundary=50, gradient=50, activations=10, forward=150, graph=15, backward=12, update=5),
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
    sizes = CellBytes(THREE, crowd(4, "except_last"), per_parameter=16.0, process=1_000)
    assert sizes.stage(begin, end) == StageBytes(16 * parameters + 1_000 + SUNDRIES, *numbers)


def test_of_frozen_values_only_the_weights_stand():
    some = [replace(THREE[0], frozen=10), replace(THREE[1], frozen=5), THREE[2]]
    sizes, plain = (CellBytes(c, crowd(4, "except_last"), per_parameter=16.0, process=1_000) for c in (some, THREE))
    for begin, end, frozen in ((0, 3, 15), (0, 1, 10), (1, 2, 5), (2, 3, 0)):
        assert sizes.stage(begin, end).fixed == plain.stage(begin, end).fixed - (16 - 4) * frozen
        assert sizes.needs(begin, end) == plain.needs(begin, end) - (16 - 4) * frozen


def test_shares_of_a_byte_round_up():
    stage = CellBytes([cost(parameters=3)], crowd(1, "always"), per_parameter=8.0 + 16 / 3).stage(0, 1)
    assert stage.fixed == 40 + SUNDRIES
    assert CellBytes([cost(parameters=1)], crowd(1, "always"), per_parameter=8.5).stage(0, 1).fixed == 9 + SUNDRIES


@unhurried
@given(layer_costs())
def test_a_cells_bytes_are_those_of_its_layers_one_after_the_other(costs):
    sizes = CellBytes(costs, crowd(4, "always"), per_parameter=16.0)
    edges = [*((one.boundary, one.gradient) for one in costs), (0, 0)]
    for begin in range(len(costs)):
        alive = forward = graph = before = 0
        for end in range(begin + 1, len(costs) + 1):
            layer = costs[end - 1]
            forward = max(forward, layer.forward_peak + (layer.boundary if end - 1 > begin else 0))
            graph = max(graph, alive + layer.graph_peak)
            alive += layer.activations
            backward = max(before, alive + layer.backward_peak)
            before = max(before, alive + edges[end][1] + layer.backward_peak)
            assert sizes.stage(begin, end) == StageBytes(
                fixed=16 * sum(one.parameters for one in costs[begin:end]) + SUNDRIES,
                inputs=edges[begin][0], activations=alive, forward_peak=forward, graph_peak=graph,
                backward_peak=backward - alive, update_peak=max(one.update_peak for one in costs[begin:end]),
                leaving=edges[end][0], coming_back=edges[end][1], sent_back=edges[begin][1] if begin else 0,
            )  # fmt: skip


def cells_of(costs):
    return [(begin, end) for begin in range(len(costs)) for end in range(begin + 1, len(costs) + 1)]


@settings(unhurried, max_examples=200)
@given(layer_costs(), st.integers(1, 9), remats)
@example([cost(), cost(gradient=1), cost(boundary=1)], 2, "always")  # B0 may find F0, F1 and B1 still unsent
def test_the_closed_form_is_never_below_the_walk(costs, micro_batches, remat):
    sizes = CellBytes(costs, crowd(micro_batches, remat), per_parameter=1.0)
    for begin, end in cells_of(costs):
        assert sizes.needs(begin, end) >= walk(micro_batches, remat, sizes.stage(begin, end))
        assert end == len(costs) or sizes.needs(begin, end) <= sizes.needs(begin, end + 1)


@settings(unhurried, max_examples=30)
@given(
    layer_costs(), st.integers(1, 9), st.sampled_from([2, 3, 4, 9]),
    st.sampled_from(["1f1b", "zero_bubble", "interleaved"]), st.sampled_from([1, 2]), st.sampled_from([0, 1, 2, ALL]),
)  # fmt: skip
@example([cost(), cost(gradient=1), cost(boundary=1)], 1, 2, "zero_bubble", 1, 0)  # at W0 both F0 and B0 may be unsent
@example([cost(), cost(gradient=1), cost(boundary=1)], 2, 2, "zero_bubble", 1, 0)
@example([cost(boundary=49, activations=32, forward=52)], 4, 9, "interleaved", 1, 1)  # F1 finds the graph of F0 kept
def test_nor_is_it_with_other_schedules(costs, micro_batches, stages, name, turns, graphs):
    """For any cell of theirs, whichever layers it holds."""
    costs = [replace(one, put_off=one.activations // 2) for one in costs]
    schedule = Recipe(name, (graphs,), {"1f1b": 1, "interleaved": 2}.get(name, turns)).actions(stages, micro_batches)
    sizes = CellBytes(costs, Crowd.of(schedule, micro_batches), per_parameter=1.0)
    for begin, end in cells_of(costs):
        for actions in schedule:
            for turn in range(turns_of(schedule)):
                mine = [replace(action, turn=0) for action in actions if action.turn == turn]
                unsent = outstanding(stages, turns_of(schedule))
                assert sizes.needs(begin, end) >= peak_bytes(mine, sizes.stage(begin, end), unsent=unsent)


@settings(unhurried, max_examples=200)
@given(layer_costs(), st.integers(1, 9), remats)
def test_the_closed_form_is_above_the_walk_by_messages_alone(costs, micro_batches, remat):
    """By one message each way, when the walk too takes the largest boundaries inside the cell for its own."""
    costs = [likely(one) for one in costs]
    sizes = CellBytes(costs, crowd(micro_batches, remat), per_parameter=1.0)
    edges = [*costs[1:], cost()]
    for begin, end in cells_of(costs):
        leaving = max(edge.boundary for edge in edges[begin:end])
        coming_back = max(edge.gradient for edge in edges[begin:end])
        stage = replace(sizes.stage(begin, end), leaving=leaving, coming_back=coming_back)
        if stage.forward_peak <= stage.graph_peak:  # or forwards decide, and the last ones differ with remat
            assert sizes.needs(begin, end) <= walk(micro_batches, remat, stage) + leaving + coming_back


@settings(unhurried, max_examples=200)
@given(layer_costs(), st.integers(1, 9), remats)
def test_without_messages_the_closed_form_is_the_walk(costs, micro_batches, remat):
    costs = [replace(likely(one), gradient=0, boundary=0 if at else one.boundary) for at, one in enumerate(costs)]
    sizes = CellBytes(costs, crowd(micro_batches, remat), per_parameter=1.0)
    for begin, end in cells_of(costs):
        assert sizes.needs(begin, end) == walk(micro_batches, remat, sizes.stage(begin, end))


@settings(unhurried, max_examples=200)
@given(layer_costs(), st.integers(1, 9), remats, st.integers(0, 1_500))
def test_reach_is_the_longest_cell_that_fits_and_all_shorter_ones_fit(costs, micro_batches, remat, room):
    sizes = CellBytes(costs, crowd(micro_batches, remat), per_parameter=1.0)
    limit = SUNDRIES + room
    reach = sizes.reach(limit)
    layers = len(costs)
    for begin in range(layers):
        fitting = [end for end in range(begin + 1, layers + 1) if sizes.needs(begin, end) <= limit]
        assert reach[begin] == max(fitting, default=begin)
        for end in range(begin + 1, reach[begin] + 1):
            assert walk(micro_batches, remat, sizes.stage(begin, end)) <= limit


def test_reach_by_hand():
    """Of weights alone: cells of at most 5."""
    costs = [cost(parameters=count) for count in (1, 1, 3, 6, 4, 1)]
    sizes = CellBytes(costs, crowd(4, "except_last"), per_parameter=1.0)
    assert sizes.reach(SUNDRIES + 5) == [3, 3, 3, 3, 6, 6]
    assert sizes.reach(SUNDRIES + 16) == [6] * 6
    assert sizes.reach(SUNDRIES) == [0, 1, 2, 3, 4, 5]


def test_reach_counts_the_largest_boundary_inside():
    """The cell of all three is sent no gradient; for what reach says of its parts, it is counted as if it were."""
    costs = [cost(), cost(gradient=100), cost()]
    sizes = CellBytes(costs, crowd(1, "always"), per_parameter=1.0)
    assert [walk(1, "always", sizes.stage(0, end)) - SUNDRIES for end in (1, 2, 3)] == [100, 100, 100]
    assert [sizes.needs(0, end) - SUNDRIES for end in (1, 2, 3)] == [100, 200, 200]
    assert sizes.reach(SUNDRIES + 199) == [1, 3, 3]
    assert sizes.reach(SUNDRIES + 200) == [3, 3, 3]


@pytest.mark.parametrize(
    ("name", "replicas", "expected"),
    [
        ("adamw", 1, 16), ("adamw", 2, 16), ("adamw", 4, 12), ("adamw", 16, 9), ("adafactor", 1, 8), ("adafactor", 4, 8)
    ],
)  # fmt: skip
def test_bytes_that_stand_for_a_parameter(name, replicas, expected):
    assert bytes_per_parameter(OptimizerSettings(name=name), replicas) == expected
