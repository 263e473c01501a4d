"""Bytes of a stage: schedules counted by hand, fields of cells, and the bound that cuts a model."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from suite.pipeline.model.cells import CellPlacement
from suite.pipeline.planning.costs import LayerCost
from suite.pipeline.planning.memory import CellBound, MemoryModel, bytes_per_parameter
from suite.pipeline.planning.stage_bytes import TERMS, CellBytes, Sent, largest_rows, peak_bytes, peak_terms
from suite.pipeline.schedule.action import Action
from suite.pipeline.schedule.config import ScheduleConfig
from suite.pipeline.schedule.flow_control import GLOO, flow_control
from suite.pipeline.schedule.remat import UNLIMITED
from suite.settings import OptimizerSettings
from tests.suite.pipeline.planning.costs import skipping_costs
from tests.suite.pipeline.schedule_helpers import cell_bytes, fill_drain

REMATS = ["always", "except_last", "never"]
ALONE = CellBytes(
    fixed_bytes=10_000,
    input_bytes=10,
    activation_bytes=100,
    forward_peak_bytes=1,
    graph_peak_bytes=150,
    backward_peak_bytes=60,
)
SENDS_ON = replace(ALONE, received_gradient_bytes=10_000, sent=(Sent(1, 1_000),))
BETWEEN = replace(SENDS_ON, sent=(Sent(1, 1_000), Sent(-1, 100_000)))

amounts = st.integers(0, 60)
remats = st.sampled_from(REMATS)


def cost(
    parameters=0, boundary_bytes=0, gradient_bytes=0, activation_bytes=0, forward=0, graph=0, backward=0, update=0
):
    sizes = parameters, boundary_bytes, gradient_bytes, activation_bytes, forward, graph, backward, update
    return LayerCost(0.0, 0.0, 0.0, 0.0, *sizes)


layer_costs = st.lists(st.builds(cost, *[amounts] * 8), min_size=1, max_size=9)


def peak_of(micro_batches, remat, stage):
    return peak_bytes(fill_drain(1, micro_batches, remat)[0], [stage], GLOO)


@pytest.mark.parametrize(
    ("remat", "micro_batches", "stage", "peak"),
    [
        # F2 30+150, B2 30+100+60, R1 20+150, B1 20+100+60, ...; inputs of two to come stand while F0 runs
        ("except_last", 3, ALONE, 190),
        ("never", 3, ALONE, 390),  # F2 30+200+150, B2 30+300+60
        ("always", 3, replace(ALONE, graph_peak_bytes=300), 330),  # R2
        # F1 is the last without a graph: it runs beside its own inputs, those before and the one received ahead
        ("except_last", 3, replace(ALONE, forward_peak_bytes=500), 530),
        ("never", 3, replace(ALONE, forward_peak_bytes=500), 390),
        ("always", 1, replace(ALONE, forward_peak_bytes=500), 510),
        ("except_last", 1, replace(ALONE, forward_peak_bytes=500), 170),  # B0 10+100+60
        # M=1: B0 has its own gradient and what F0 sent
        ("always", 1, BETWEEN, 10_000 + 1_000 + 170),
        # M=3: B0 has its gradient and of the last four sent two forward (F1, F2) and two back (B2, B1): 10+100+60
        ("except_last", 3, BETWEEN, 10_000 + 2 * 1_000 + 2 * 100_000 + 170),
        # without gradients to send back B2 is the peak: its gradient, two ahead, three sent forward, 30+100+60
        ("except_last", 3, SENDS_ON, 3 * 10_000 + 3 * 1_000 + 190),
        # with them it is B3, the first with four sent back before it: 40+100+60
        ("except_last", 8, BETWEEN, 3 * 10_000 + 4 * 100_000 + 200),
    ],
)
def test_a_walk_counted_by_hand(remat, micro_batches, stage, peak):
    assert peak_of(micro_batches, remat, stage) == 10_000 + peak
    assert peak_of(micro_batches, remat, replace(stage, update_peak_bytes=peak)) == 10_000 + peak
    assert peak_of(micro_batches, remat, replace(stage, update_peak_bytes=peak + 1)) == 10_000 + peak + 1


def test_gradients_stand_from_the_first_backward_on():
    """Of three layers the last makes its 60 bytes of gradients first, while 40 bytes of activations are still there."""
    stage = replace(ALONE, forward_peak_bytes=500, gradient_bytes=100, made_gradient_bytes=70)
    assert peak_of(3, "always", stage) == 10_000 + 530  # F1, as without gradients
    assert peak_of(3, "never", replace(stage, backward_peak_bytes=100)) == 10_000 + 30 + 300 + 100 + 70  # B2
    late = replace(stage, forward_peak_bytes=0, made_gradient_bytes=0, backward_peak_bytes=60)
    assert peak_of(3, "always", late) == 10_000 + 100 + 20 + 100 + 60  # B1, where all are there; B2 has one input more
    assert peak_of(1, "always", replace(late, update_peak_bytes=200)) == 10_000 + 100 + 200


def test_what_a_first_backward_makes_is_counted_layer_by_layer():
    """``THREE`` are layers of 10, 20 and 30 parameters; a gradient has 4 bytes a parameter."""
    cell = cell_bytes(MemoryModel(THREE, 4, 16.0, 4), 0, 3)
    assert cell.gradient_bytes == 4 * 60
    # a backward needs 300+50+70 in the middle layer with 200 of gradients, 310+12 in the last with 120, 100+30+50 in
    # the first with 240; without gradients the middle one is the peak, 420
    assert cell.made_gradient_bytes == max(420 + 200, 322 + 120, 180 + 240) - 420
    assert cell_bytes(MemoryModel(THREE, 4, 16.0), 0, 3).gradient_bytes == 0


THREE = [
    cost(10, 4, 0, 100, 110, 120, 50, 7),
    cost(20, 40, 30, 200, 90, 260, 70, 9),
    cost(30, 50, 50, 10, 150, 15, 12, 5),
]
"""In the order of the arguments of ``cost``."""


def sent_by(forward, back):
    """Returns what a cell sends to its neighbours; a message of no bytes is not sent."""
    return tuple(Sent(way, size) for way, size in ((1, forward), (-1, back)) if size)


def test_of_frozen_values_only_the_weights_stand():
    some = [replace(THREE[0], frozen=10), replace(THREE[1], frozen=5), THREE[2]]
    models = [MemoryModel(costs, 4, 16.0) for costs in (some, THREE)]
    for begin, end, frozen in ((0, 3, 15), (0, 1, 10), (1, 2, 5), (2, 3, 0)):
        with_frozen, plain = (cell_bytes(model, begin, end).fixed_bytes for model in models)
        assert with_frozen == plain - (16 - 4) * frozen


def test_shares_of_a_byte_round_up():
    assert cell_bytes(MemoryModel([cost(parameters=1)], 1, 8.5), 0, 1).fixed_bytes == 9


@settings(max_examples=40)
@given(layer_costs)
def test_a_cells_bytes_are_those_of_its_layers_one_after_the_other(costs):
    model = MemoryModel(costs, 4, 16.0)
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
            assert cell_bytes(model, begin, end) == CellBytes(
                fixed_bytes=16 * sum(one.parameters for one in costs[begin:end]),
                input_bytes=edges[begin][0],
                activation_bytes=alive,
                forward_peak_bytes=forward,
                graph_peak_bytes=graph,
                backward_peak_bytes=backward - alive,
                update_peak_bytes=max(one.update_peak_bytes for one in costs[begin:end]),
                received_gradient_bytes=edges[end][1],
                sent=sent_by(edges[end][0], edges[begin][1] if begin else 0),
            )


def cells_of(costs):
    return [(begin, end) for begin in range(len(costs)) for end in range(begin + 1, len(costs) + 1)]


@st.composite
def action_lists(draw, micro_batches):
    """A valid list of a stage of one cell: micro-batches in order, any recomputes, ``B`` or ``I`` and ``W``."""
    kinds = draw(
        st.lists(st.sampled_from(["FB", "FRB", "FIW", "FRIW"]), min_size=micro_batches, max_size=micro_batches)
    )
    done, actions = [0] * micro_batches, []
    while True:
        nexts = {i: order[done[i]] for i, order in enumerate(kinds) if done[i] < len(order)}
        firsts = {next((i for i, kind in nexts.items() if kind in own), None) for own in ("F", "RBI")}
        ready = [i for i, kind in nexts.items() if kind in "RW" or i in firsts]
        if not ready:
            return actions
        i = draw(st.sampled_from(ready))
        actions.append(Action(nexts[i], i))
        done[i] += 1


@settings(max_examples=60)
@given(st.sampled_from(["gloo", "nccl"]), st.integers(1, 6), st.data())
def test_the_terms_of_a_cells_peaks_add_up_to_its_peak(transport, micro_batches, data):
    actions, flow = data.draw(action_lists(micro_batches)), flow_control(transport, 2, 1)
    sizes = {name: data.draw(amounts) for name in TERMS}
    *own, leaving, sent_back = sizes.values()
    stage = CellBytes(*own, sent=sent_by(leaving, sent_back))
    running, peak = (peak_terms(actions, 0, flow) @ list(sizes.values())).max(), peak_bytes(actions, [stage], flow)
    summed = max(running, sizes["gradient_bytes"])  # the update begins with all gradients
    if min(leaving, sent_back) == 0 or leaving == sent_back:
        assert summed == peak
    else:  # of one size those of the other may have replaced count too
        assert (
            peak <= summed <= peak_bytes(actions, [replace(stage, sent=sent_by(*[max(leaving, sent_back)] * 2))], flow)
        )


def bound_of(costs, schedule, micro_batches, flow=GLOO):
    terms = np.concatenate([peak_terms(actions, 0, flow) for actions in schedule])
    return CellBound(MemoryModel(costs, micro_batches, 1.0), largest_rows(terms), flow, len(schedule))


def peak(bound, begin, end):
    return bound.peak(np.array([begin]), np.array([end]))[0]


@settings(max_examples=60)
@given(
    skipping_costs(),
    st.integers(1, 9),
    st.sampled_from(["fill_drain", "1f1b", "zero_bubble"]),
    st.sampled_from([0, 1, 2, UNLIMITED]),
    st.sampled_from(["gloo", "nccl"]),
    st.data(),
)
def test_no_cell_needs_more_than_its_bound_and_no_shorter_one_does(costs, micro_batches, name, graphs, transport, data):
    costs = [replace(one, deferred_bytes=one.activation_bytes // 2) for one in costs]
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(costs) - 1)), max_size=len(costs) - 1)))
    stages = len(cuts) + 1
    cells = [range(begin, end) for begin, end in pairwise([0, *cuts, len(costs)])]
    schedule, flow = ScheduleConfig(name, (graphs,)).actions(stages, micro_batches), flow_control(transport, stages, 1)
    bound = bound_of(costs, schedule, micro_batches, flow)
    found = MemoryModel(costs, micro_batches, 1.0).in_partition(cells, CellPlacement(stages))
    for cell, own, actions in zip(cells, found, schedule, strict=True):
        assert peak(bound, cell[0], cell[-1] + 1) >= peak_bytes(actions, [own], flow)
        assert cell[-1] == cell[0] or peak(bound, cell[0], cell[-1]) <= peak(bound, cell[0], cell[-1] + 1)


@settings(max_examples=40)
@given(layer_costs, st.integers(1, 9), remats, st.integers(0, 1_500))
def test_the_furthest_end_is_that_of_the_longest_cell_that_fits(costs, micro_batches, remat, limit):
    bound = bound_of(costs, fill_drain(3, micro_batches, remat), micro_batches)
    for begin, furthest in enumerate(bound.furthest_end(limit)):
        fitting = [end for end in range(begin + 1, len(costs) + 1) if peak(bound, begin, end) <= limit]
        assert furthest == max(fitting, default=begin)


def test_the_bound_counts_the_largest_boundary_inside():
    """The cell of all three is sent no gradient; so that its parts need no more, it counts as if it were."""
    costs = [cost(), cost(gradient_bytes=100), cost()]
    bound = bound_of(costs, fill_drain(1, 1, "always"), 1)
    model = MemoryModel(costs, 1, 1.0)
    assert [peak_of(1, "always", cell_bytes(model, 0, end)) for end in (1, 2, 3)] == [100, 100, 100]
    assert [peak(bound, 0, end) for end in (1, 2, 3)] == [100, 200, 200]
    assert bound.furthest_end(199) == [1, 3, 3]
    assert bound.furthest_end(200) == [3, 3, 3]


def test_the_last_cell_has_gradients_alone_in_flight():
    """Its activations replace none of the four that count."""
    costs, schedule = [cost(), cost(gradient_bytes=100)], ScheduleConfig("1f1b").actions(2, 8)
    last = cell_bytes(MemoryModel(costs, 8, 1.0), 1, 2)
    assert peak(bound_of(costs, schedule, 8), 1, 2) == peak_bytes(schedule[1], [last], GLOO) == 400


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"name": "adamw"}, [16, 16, 12, 9]),
        ({"name": "adafactor"}, [8, 8, 8, 8]),
        ({"name": "rmsprop"}, [16, 16, 12, 9]),
        ({"name": "sgd"}, [12, 14, 11, 8.75]),
        ({"name": "sgd", "beta1": 0}, [8, 8, 8, 8]),  # without momentum there is no state
    ],
)
def test_bytes_that_stand_for_a_parameter_on_1_2_4_and_16_replicas(settings, expected):
    assert [bytes_per_parameter(OptimizerSettings(**settings), replicas) for replicas in (1, 2, 4, 16)] == expected
