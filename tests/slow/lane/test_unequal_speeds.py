"""Sleeping stages with speeds 1 : 2 : 3: the planned cut and order among all of them, measured."""

import statistics
from itertools import combinations, pairwise, permutations

from experiments.tables.table2 import SleepingWork
from launch.backends.processes import run_processes
from launch.worker.measure import MeasuredPipeline, measure_steps, slowest_s
from suite.pipeline.planning.devices import Machine, StageDevice
from suite.pipeline.planning.fit import MemoryFit
from suite.pipeline.planning.plan import make_plan
from suite.pipeline.schedule.config import ScheduleConfig
from suite.settings import PipelineSettings
from tests.suite.pipeline.planning import costs

ROOMY = 1 << 50
LAYERS_S = (0.03, 0.03, 0.02, 0.04, 0.05, 0.03)
"""F and B of each layer at speed 1; nothing is recomputed."""
SPEEDS = (1, 2, 3)
ASKED = PipelineSettings(stages=3, micro_batches=8, schedule="1f1b", remat="never")


def measured_s(cells, order):
    """Returns the median step of three stages that sleep as long as their layers take at their speed."""
    ends = [sum(cells[:at]) for at in range(4)]
    each = [sum(LAYERS_S[begin:end]) / speed for (begin, end), speed in zip(pairwise(ends), order, strict=True)]
    work = SleepingWork(tuple((seconds, seconds) for seconds in each), ASKED.micro_batches)
    run = MeasuredPipeline(work, (1, 1, 1), ScheduleConfig.from_settings(ASKED, "gloo"))
    return statistics.median(slowest_s(run_processes(measure_steps, 3, run, 3)))


def planned(order):
    """Returns the step and the cells of the plan with the devices in this order."""

    def layers(speed):
        return tuple(costs.layer(seconds / speed, backward_s=seconds / speed) for seconds in LAYERS_S)

    devices = [StageDevice(f"x{speed}", ROOMY, layers(speed)) for speed in order]
    stages = MemoryFit(layers(1), ASKED, 1.0, Machine(ROOMY)).choose_devices(devices)
    plan = make_plan(layers(1), ASKED, 1.0, Machine(ROOMY, stages=stages))
    return plan.step_s, plan.layers_per_cell, order


def test_the_plan_is_within_5_percent_of_the_best_of_all_cuts_and_orders_and_far_from_the_equal_cut():
    _, cells, order = min(map(planned, permutations(SPEEDS)))
    cuts = [
        tuple(end - begin for begin, end in pairwise((0, *inner, len(LAYERS_S))))
        for inner in combinations(range(1, len(LAYERS_S)), 2)
    ]
    seconds = {(cut, each): measured_s(cut, each) for cut in cuts for each in permutations(SPEEDS)}
    chosen_s, equal_s = seconds[cells, order], min(seconds[(2, 2, 2), each] for each in permutations(SPEEDS))
    print(f"chosen {cells} on {order}: {chosen_s:.3f} s, best {min(seconds.values()):.3f}, equal cut {equal_s:.3f}")
    assert chosen_s <= 1.05 * min(seconds.values())
    assert equal_s >= 1.3 * chosen_s
