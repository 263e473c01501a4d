"""Plans: cells, times and bytes against the parts they are made of, and all errors at once."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from suite.errors import PlanError
from suite.pipeline.model.cells import CellPlacement
from suite.pipeline.planning.costs import LayerCost, SkipInput
from suite.pipeline.planning.devices import GIB, Machine
from suite.pipeline.planning.fit import Problem
from suite.pipeline.planning.memory import UNCOUNTED_BYTES, CellBound, MemoryModel
from suite.pipeline.planning.partition import fewest_cells
from suite.pipeline.planning.plan import make_plan
from suite.pipeline.planning.simulate import CellCost, Link, Links, cell_costs, simulate
from suite.pipeline.planning.stage_bytes import peak_bytes, peak_terms
from suite.pipeline.runtime.gradient_reducer import ACCELERATOR_BUCKET_BYTES, BUCKET_BYTES
from suite.pipeline.schedule.flow_control import GLOO
from suite.settings import PipelineSettings
from tests.suite.pipeline.planning.costs import layer
from tests.suite.pipeline.schedule.test_nccl_deadlock import STOPS_WITH_A_SKIP
from tests.suite.pipeline.schedule_helpers import cell_bytes, fill_drain

SCHEDULES = [("fill_drain", 1), ("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1), ("zero_bubble", 2)]
ROOMY = Machine(memory_limit_bytes=1 << 50)

times = st.integers(0, 50)
amounts = st.integers(0, 60)
costs_of_layers = st.lists(st.builds(LayerCost, *[times] * 4, *[amounts] * 8), min_size=1, max_size=9)


def plan(costs, machine=ROOMY, bytes_per_parameter=16.0, **pipeline):
    return make_plan(Problem(costs, PipelineSettings(**pipeline), bytes_per_parameter, machine))


def faults(costs, machine=ROOMY, bytes_per_parameter=16.0, **pipeline):
    with pytest.raises(PlanError) as caught:
        plan(costs, machine, bytes_per_parameter, **pipeline)
    return caught.value.errors


def test_a_plan_by_hand():
    costs = [
        layer(1, parameters=3, boundary_bytes=8, gradient_bytes=0, update_s=0.5),
        layer(1, parameters=5, boundary_bytes=20, gradient_bytes=10, update_s=0.25),
        layer(2, parameters=7, boundary_bytes=30, gradient_bytes=15, update_s=1.0),
    ]
    found = plan(costs, replace(ROOMY, link=Link(0.5, 10)), stages=2, micro_batches=2)
    assert found.layers_per_cell == (2, 1)
    first, second = found.cells
    assert [(stage.begin, stage.end, stage.parameters) for stage in found.cells] == [(0, 2, 8), (2, 3, 7)]
    assert first.cost == CellCost(2, 2, 4, 0.75, activation_bytes=30, gradient_bytes=0)
    assert second.cost == CellCost(2, 2, 4, 1.0, activation_bytes=0, gradient_bytes=15)
    # forward a message takes 3 + 0.5, back 1.5 + 0.5:
    # stage 0  F0 0-2  F1 2-4  B1 16.5-20.5  R0 20.5-22.5  B0 22.5-26.5
    # stage 1  F0 5.5-7.5  F1 8.5-10.5  B1 10.5-14.5  R0 14.5-16.5  B0 16.5-20.5
    # then both agree, by a message there and one back, and update
    assert found.step_s == 26.5 + 2 * 0.5 + 1
    # stage 1 begins at 5.5 and has 12 to do; then the last gradient takes 2, and its backward on stage 0 takes 4
    assert found.lower_bound_s == 5.5 + 12 + 2 + 4 + 2 * 0.5 + 1


@pytest.mark.parametrize(("workers", "ring", "tree"), [(1, 0, 0), (2, 2, 2), (4, 6, 4), (8, 14, 6), (9, 16, 8)])
def test_more_workers_take_longer_to_agree(workers, ring, tree):
    across = Links(Link(0.25), Link(0.5), frozenset({1}))
    for link in (Link(0.5), across):
        assert replace(ROOMY, link=link).norm_all_reduce_s(workers) == ring * 0.5
        assert replace(ROOMY, link=link, transport="nccl").norm_all_reduce_s(workers) == tree * 0.5
    far = replace(ROOMY, link=Link(0.25), reduce_latency_s=0.5)  # replicas on several nodes
    assert far.norm_all_reduce_s(workers) == ring * 0.5
    assert far.reduce_s_per_byte(workers) * BUCKET_BYTES == ring * 0.5  # once for each bucket
    assert replace(far, transport="nccl").reduce_s_per_byte(workers) * ACCELERATOR_BUCKET_BYTES == tree * 0.5


def test_messages_keep_their_two_stages_busy_and_those_that_stay_on_a_stage_do_not():
    """A V of two stages: layers 0 and 3 are stage 0's, 1 and 2 stage 1's. Layer 3 pops what layer 0 stashed: on its
    own stage. Layer 2 pops from layer 0: on another."""
    costs = [
        layer(boundary_bytes=0, gradient_bytes=0),
        layer(boundary_bytes=10 + 20 + 2, gradient_bytes=4 + 9 + 3),
        layer(boundary_bytes=10 + 20 + 2, gradient_bytes=4 + 9 + 3, skip_inputs=(SkipInput(2, 20, 9, False),)),
        layer(boundary_bytes=8 + 2, gradient_bytes=0 + 3, skip_inputs=(SkipInput(3, 2, 3, False),)),
    ]
    link = Link(5.0, 1.0, overhead_s=100.0, overhead_s_per_byte=1.0)
    cells, placement = [range(at, at + 1) for at in range(4)], CellPlacement(2, (0, 1, 1, 0))
    found = cell_costs(costs, cells, placement, link)
    assert [cost.forward_messages_s for cost in found] == [110 + 120, 110, 120 + 108, 108]
    assert [cost.backward_messages_s for cost in found] == [104 + 109, 104, 109, 0]  # no message is of 0 bytes
    first = found[0]
    assert [first.seconds(kind, False) for kind in "FRBIW"] == [1 + 230, 1, 2 + 213, 2 + 213, 0]
    assert first.least_seconds == (231, 0, 215, 0)


def test_an_update_takes_what_its_layers_take_and_a_reduction_over_replicas():
    costs = [layer(parameters=3_000, update_s=0.5), layer(parameters=1_000, update_s=0.25)]
    machine = replace(ROOMY, reduce_bytes_per_s=1_000.0)
    assert plan(costs, machine).cells[0].cost.update_s == 0.75
    # a ring of 4 passes each of 16,000 bytes 2 * 3/4 times
    assert plan(costs, machine, replicas=4).cells[0].cost.update_s == 0.75 + 24


def p2p_bytes_of_stages(costs, **settings):
    """Returns how much more each cell takes where a communicator takes a byte."""
    machines = ROOMY, replace(ROOMY, p2p_bytes=1)
    without, found = ([cell.peak_bytes for cell in plan(costs, machine, **settings).cells] for machine in machines)
    return [more - fewer for more, fewer in zip(found, without, strict=True)]


@pytest.mark.parametrize(
    ("settings", "communicators"),
    [
        ({"stages": 1}, [0]),
        ({"stages": 4}, [2, 4, 4, 2]),
        # of stage 1's four cells each has a neighbour on either side; stage 0's first cell has one
        ({"stages": 4, "schedule": "interleaved", "virtual_stages": 4}, [14, 16, 16, 14]),
    ],
)
def test_each_stage_keeps_the_bytes_of_its_point_to_point_communicators(settings, communicators):
    assert p2p_bytes_of_stages([layer(parameters=1)] * 16, **settings)[: settings["stages"]] == communicators


def test_a_skip_to_a_stage_beyond_the_next_takes_communicators_too():
    costs = [layer(), layer(), layer(skip_inputs=(SkipInput(2, 0, 0, False),)), layer()]
    assert p2p_bytes_of_stages(costs, stages=4) == [4, 4, 6, 2]


def test_a_schedule_that_deadlocks_on_nccl_with_the_models_skips_is_refused():
    settings = {"schedule": "csv", "schedule_rows": STOPS_WITH_A_SKIP, "stages": 3, "micro_batches": 13}
    on_nccl, takes_skip = replace(ROOMY, transport="nccl"), layer(skip_inputs=(SkipInput(2, 1, 1, False),))
    assert plan([layer()] * 3, on_nccl, **settings)
    (fault,) = faults([layer(), layer(), takes_skip], on_nccl, **settings)
    assert "deadlocks: stage 0 at B0, stage 1 at R3, stage 2 at F6" in fault
    assert "at stage 0, 1, 2 more than 4 messages would be in flight" in fault


def test_cells_are_cut_for_what_communicators_leave():
    costs = [layer(parameters=10)] * 4
    machine = Machine(memory_limit_bytes=UNCOUNTED_BYTES + 300 + 200)
    assert plan(costs, machine, bytes_per_parameter=10, stages=2).layers_per_cell == (2, 2)
    assert plan(costs, replace(machine, p2p_bytes=150), bytes_per_parameter=10, stages=2).layers_per_cell == (2, 2)
    (fault,) = faults(costs, replace(machine, p2p_bytes=151), bytes_per_parameter=10, stages=2)
    assert "needs" in fault


@settings(max_examples=30)
@given(costs_of_layers, st.integers(1, 9), st.integers(1, 9), st.sampled_from(["always", "except_last", "never"]))
def test_a_plan_is_the_simulation_of_its_own_stages(costs, stages, micro_batches, remat):
    stages = min(stages, len(costs))
    link = Link(1.0, 4.0)
    found = plan(costs, replace(ROOMY, link=link), stages=stages, micro_batches=micro_batches, remat=remat)
    assert sum(found.layers_per_cell) == len(costs)
    assert len(found.layers_per_cell) == stages
    schedule = fill_drain(stages, micro_batches, remat)
    norm_all_reduce_s = 2.0 * (stages - 1)
    cells = [stage.cost for stage in found.cells]
    assert found.timeline == simulate(schedule, cells, link, norm_all_reduce_s=norm_all_reduce_s)
    for stage, actions in zip(found.cells, schedule, strict=True):
        inside = costs[stage.begin : stage.end]
        assert stage.cost.forward_s == sum(one.forward_s for one in inside)
        assert stage.cost.recompute_s == sum(one.recompute_s for one in inside)
        assert stage.cost.backward_s == sum(one.backward_s for one in inside)
        own = cell_bytes(MemoryModel(costs, micro_batches, 16.0, 4), stage.begin, stage.end)
        assert stage.peak_bytes == peak_bytes(actions, [own], GLOO) + UNCOUNTED_BYTES


@settings(max_examples=40)
@given(
    costs_of_layers, st.integers(1, 9), st.integers(1, 9),
    st.sampled_from(["always", "except_last", "never", "auto"]), st.sampled_from(SCHEDULES),
)  # fmt: skip
def test_no_step_goes_below_the_limit_of_its_plan(costs, stages, micro_batches, remat, schedule):
    name, virtual_stages = schedule
    costs = [replace(one, weight_grad_s=one.backward_s / 4, split_s=1) for one in costs]
    settings = {"stages": min(stages, len(costs)), "remat": remat, "schedule": name}
    if virtual_stages > 1:
        assume(settings["stages"] > 1)
        costs, settings = costs * 2, {**settings, "virtual_stages": virtual_stages}
    found = plan(costs, micro_batches=micro_batches, **settings)
    assert 0 <= found.lower_bound_s <= found.step_s


def test_the_limit_of_equal_stages_is_reached():
    costs = [layer(1, update_s=5.0)] * 6
    for remat, again in (("always", 4), ("except_last", 3), ("never", 0)):
        found = plan(costs, stages=3, micro_batches=4, remat=remat)
        assert found.step_s == (4 + 3 - 1) * 6 + again * 2 + 10
        assert found.lower_bound_s == (4 + 3 - 1) * 6 + 10  # nothing has to be recomputed


@settings(max_examples=50)
@given(costs_of_layers, st.integers(1, 9), st.integers(1, 9), st.integers(0, 3_000))
def test_every_stage_of_a_plan_keeps_to_the_device(costs, stages, micro_batches, room):
    """Or none is made, and what is said of the number of stages is true."""
    machine = Machine(memory_limit_bytes=UNCOUNTED_BYTES + room)
    pipeline = PipelineSettings(stages=min(stages, len(costs)), micro_batches=micro_batches)
    try:
        found = make_plan(Problem(costs, pipeline, 1.0, machine))
    except PlanError as error:
        message = str(error)
    else:
        assert all(stage.peak_bytes <= machine.memory_limit_bytes for stage in found.cells)
        return
    terms = [peak_terms(actions, 0, GLOO) for actions in fill_drain(pipeline.stages, micro_batches, pipeline.remat)]
    bound = CellBound(MemoryModel(costs, micro_batches, 1.0), np.concatenate(terms), GLOO, pipeline.stages)
    fewest = fewest_cells(bound.furthest_end(room))
    if fewest is None:
        assert " alone needs " in message
    elif fewest > pipeline.stages:
        assert f"{fewest} stages are the fewest" in message
    else:
        assert f"use fewer stages, down to {fewest}" in message


def test_what_a_worker_takes_for_itself_is_part_of_the_device():
    costs = [layer(parameters=10)]
    assert (
        plan(costs, Machine(memory_limit_bytes=UNCOUNTED_BYTES + 160 + 40, process_bytes=40)).cells[0].peak_bytes
        == UNCOUNTED_BYTES + 200
    )
    faults(costs, Machine(memory_limit_bytes=UNCOUNTED_BYTES + 160 + 40, process_bytes=41))


def test_all_faults_of_cells_by_hand_at_once():
    first, second = faults([layer()] * 7, stages=4, layers_per_cell=(2, 0, 2))
    assert first == "pipeline.layers_per_cell names 3 cells, pipeline.stages is 4"
    assert "hold 4 layers, the model has 7: 3 left out, cell 1 has 0" in second


def test_every_stage_by_hand_that_does_not_fit_is_named():
    costs = [layer(parameters=GIB // 16)] * 8
    found = faults(costs, Machine(memory_limit_bytes=2 * GIB), stages=3, layers_per_cell=(3, 1, 4))
    assert found == (
        "stage 0 (layers 0-2) needs 3.00 GiB, the device has 2.00 GiB",
        "stage 2 (layers 4-7) needs 4.00 GiB, the device has 2.00 GiB",
    )


FAULTY = [layer(), replace(layer(), forward_s=-1.0), layer(parameters=-1)]
LARGE = [layer(), layer(parameters=5 * GIB // 16), layer()]
WIDE = [layer(), layer(boundary_bytes=GIB), layer(boundary_bytes=GIB)]
"""Where a cell begins with layer 1, its inputs are kept for each micro-batch, beside as many on their way out."""


@pytest.mark.parametrize(
    ("costs", "memory_gib", "stages", "fault"),
    [
        (FAULTY, 2, 1, "layer 1 has forward_s = -1.0"),
        (FAULTY, 2, 1, "layer 2 has parameters = -1"),
        ([layer()] * 3, 2, 5, "cannot cut 3 layers into 5 stages; use 1 to 3 stages"),
        (LARGE, 2, 2, "layer 1 alone needs 5.00 GiB, the device has 2.00 GiB"),
        (WIDE, 6, 3, "layer 1 does not fit as the first of a cell, whose inputs are saved too; use fewer stages, down"),
    ],
)
def test_layers_that_cannot_be_planned_are_named_with_the_reason(costs, memory_gib, stages, fault):
    (message,) = faults(costs, Machine(memory_limit_bytes=memory_gib * GIB), stages=stages, micro_batches=4)
    assert fault in message
