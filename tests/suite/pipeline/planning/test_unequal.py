"""Stages on unequal devices: cut and devices against every other choice there is."""

import random
from dataclasses import replace
from itertools import combinations, pairwise, permutations

import pytest

from suite.errors import PlacementError, PlanError
from suite.pipeline.planning.devices import Machine, StageDevice
from suite.pipeline.planning.fit import MemoryFit
from suite.pipeline.planning.memory import UNCOUNTED_BYTES
from suite.pipeline.planning.partition import partition_unequal
from suite.pipeline.planning.plan import make_plan
from suite.pipeline.planning.schedule_choice import compare_schedules, search_schedule
from suite.settings import PipelineSettings
from tests.suite.pipeline.planning.test_auto import ROOMY, layer

SPEEDS = (1, 2, 3)


def every_choice(layers, kinds, stages):
    for chosen in combinations(kinds, stages):
        for inner in combinations(range(1, layers), stages - 1):
            yield chosen, list(pairwise((0, *inner, layers)))


def test_a_thousand_random_models_are_cut_as_well_as_by_trying_every_cut_on_every_choice_of_devices():
    rng, solved = random.Random(0), 0
    for _ in range(1000):
        layers, kinds = rng.randint(2, 7), [rng.randrange(3) for _ in range(rng.randint(1, 5))]
        stages = rng.randint(1, min(layers, len(kinds)))
        costs = [[speed * rng.randint(0, 5) for _ in range(layers)] for speed in SPEEDS]
        ends = [[min(layers, at + rng.randint(0, layers)) for at in range(layers)] for _ in SPEEDS]
        scores = []
        for chosen, cells in every_choice(layers, kinds, stages):
            if all(end <= ends[kind][begin] for kind, (begin, end) in zip(chosen, cells, strict=True)):
                loads = [sum(costs[kind][begin:end]) for kind, (begin, end) in zip(chosen, cells, strict=True)]
                scores.append((max(loads), sum(load * load for load in loads)))
        if not scores:
            with pytest.raises(PlacementError, match="fits these devices"):
                partition_unequal(costs, kinds, stages, ends)
            continue
        chosen, sizes = partition_unequal(costs, kinds, stages, ends)
        begins = [sum(sizes[:at]) for at in range(stages + 1)]
        loads = [sum(costs[kind][begin:end]) for kind, (begin, end) in zip(chosen, pairwise(begins), strict=True)]
        assert (max(loads), sum(load * load for load in loads)) == min(scores)
        assert (tuple(chosen), list(pairwise(begins))) in list(every_choice(layers, kinds, stages))
        assert all(end <= ends[kind][begin] for kind, (begin, end) in zip(chosen, pairwise(begins), strict=True))
        solved += 1
    assert solved > 300


def device(costs, speed, room=ROOMY):
    names = ("forward_s", "recompute_s", "backward_s", "weight_grad_s")
    faster = [replace(cost, **{name: getattr(cost, name) / speed for name in names}) for cost in costs]
    return StageDevice(f"x{speed}", UNCOUNTED_BYTES + room, tuple(faster))


def planned(costs, devices, asked):
    most = max(each.memory_limit_bytes for each in devices)
    return make_plan(costs, asked, 1.0, Machine(most, stages=tuple(devices)))


def chosen(costs, devices, asked):
    machine = Machine(max(each.memory_limit_bytes for each in devices))
    return MemoryFit(costs, asked, 1.0, machine).choose_devices(devices)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_steps_on_speeds_1_2_3_are_within_5_percent_of_the_best_of_all_cuts_and_orders(seed):
    rng = random.Random(seed)
    costs = [layer(rng.randint(2, 9), split_s=0.0) for _ in range(rng.randint(6, 9))]
    asked = PipelineSettings(stages=3, micro_batches=8, schedule="1f1b", remat="never")
    orders = list(permutations(device(costs, speed) for speed in SPEEDS))
    by_hand = [
        asked.model_copy(update={"layers_per_cell": tuple(end - begin for begin, end in cells)})
        for _, cells in every_choice(len(costs), range(3), 3)
    ]
    best_s = min(planned(costs, order, one).step_s for order in orders for one in by_hand)
    found_s = min(planned(costs, chosen(costs, order, asked), asked).step_s for order in orders)
    assert best_s <= found_s <= 1.05 * best_s


def test_equal_layers_are_shared_out_by_speed():
    """12 layers on speeds 1, 2 and 3: 2, 4 and 6 of them; equal stages of 4 would take 4 / 2 = twice as long."""
    costs = [layer(1.0, split_s=0.0)] * 12
    asked = PipelineSettings(stages=3, micro_batches=8, schedule="1f1b", remat="never")
    plan = planned(costs, [device(costs, speed) for speed in SPEEDS], asked)
    assert plan.layers_per_cell == (2, 4, 6)
    assert [cell.cost.forward_s for cell in plan.cells] == pytest.approx([2.0] * 3)


def test_the_faster_of_more_devices_than_stages_are_used():
    costs = [layer(1.0, split_s=0.0)] * 12
    asked = PipelineSettings(stages=2, micro_batches=8, schedule="1f1b", remat="never")
    names = [one.name for one in chosen(costs, [device(costs, speed) for speed in (1, 2, 3, 3)], asked)]
    assert names == ["x3", "x3"]


@pytest.mark.parametrize("name", ["fill_drain", "1f1b", "zero_bubble", "interleaved", "zbv", "v_min", "auto"])
def test_no_stage_exceeds_its_own_device(name):
    """Stage 1's device has less than its share of the layers by speed needs."""
    costs = [layer(1.0, parameters=10**7, split_s=0.0)] * 12
    cells = 2 if name in ("interleaved", "zbv", "v_min") else 1
    asked = PipelineSettings(stages=2, micro_batches=8, schedule=name, virtual_stages=cells, remat="auto")
    roomy = planned(costs, [device(costs, 1), device(costs, 2)], asked)
    placement = roomy.schedule_config.placement(2)
    needed = [max(placement.on_stage(k, [cell.peak_bytes for cell in roomy.cells])) for k in range(2)]
    rooms = 2 * (needed[0] - UNCOUNTED_BYTES), (needed[1] - UNCOUNTED_BYTES) * 4 // 5
    devices = [device(costs, speed, room) for speed, room in zip((1, 2), rooms, strict=True)]
    machine = Machine(max(one.memory_limit_bytes for one in devices), stages=tuple(devices))
    plan = compare_schedules(make_plan(costs, asked, 1.0, machine), costs, asked, 1.0, machine)
    plan = search_schedule(plan, costs, asked, 1.0, machine)
    placement = plan.schedule_config.placement(2)
    for at, cell in enumerate(plan.cells):
        assert cell.peak_bytes <= machine.limit_of(placement.stage_of(at))
    assert plan.lower_bound_s <= plan.step_s
    with pytest.raises(PlanError, match="the device has"):
        planned(costs, [device(costs, 1, room=200), device(costs, 2, room=100)], asked)
