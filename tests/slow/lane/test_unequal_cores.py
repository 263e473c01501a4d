"""One whole core and one at half its time, with real layers: the planned cut and order among all of them, measured."""

import statistics
from itertools import permutations

from experiments.tables.prediction import EncoderDecoder
from launch.backends.processes import run_processes
from launch.worker.measure import MeasuredPipeline, measure_layers, measure_steps, slowest_s
from suite.pipeline.planning.devices import Machine, StageDevice
from suite.pipeline.planning.fit import MemoryFit
from suite.pipeline.planning.plan import make_plan
from suite.pipeline.schedule.config import ScheduleConfig
from suite.settings import PipelineSettings
from tests.control_groups import control_groups

ROOMY = 1 << 50
ASKED = PipelineSettings(stages=2, micro_batches=4, schedule="1f1b", remat="never")
PERIOD_US = 5_000
"""Of the quota: much shorter than a micro-batch in a layer."""


class Model(EncoderDecoder):
    """Layers of two kinds, two embeddings and a head."""

    pipeline = ASKED


V1 = {"cpu": {"cpu.cfs_period_us": PERIOD_US, "cpu.cfs_quota_us": PERIOD_US // 2}}
V2 = {"cpu.max": f"{PERIOD_US // 2} {PERIOD_US}"}


def in_groups(rank, world, rendezvous, measure, groups, *args):
    """Measures with a rank in each of these groups, or where it is if that is None."""
    if groups[rank] is not None:
        (groups[rank] / "cgroup.procs").write_text("0")  # this process
    return measure(rank, world, rendezvous, *args)


def measured_s(work, cells, order):
    """Returns the median step of two stages with so many layers, on cores in this order."""
    run = MeasuredPipeline(work, cells, ScheduleConfig.from_settings(ASKED, "gloo"))
    return statistics.median(slowest_s(run_processes(in_groups, 2, measure_steps, order, run, 4)))


def planned(costs_on, order):
    """Returns the step and the cells of the plan with the cores in this order."""
    devices = [StageDevice(f"{group}", ROOMY, costs_on[group]) for group in order]
    costs = costs_on[None]
    stages = MemoryFit(costs, ASKED, 1.0, Machine(ROOMY)).choose_devices(devices)
    plan = make_plan(costs, ASKED, 1.0, Machine(ROOMY, stages=stages))
    return plan.step_s, plan.layers_per_cell, order


def test_the_plan_is_within_5_percent_of_the_best_of_all_cuts_and_orders_and_far_from_the_equal_cut(tmp_path):
    work = Model()
    with control_groups(V1, V2) as [half_core]:
        kinds = (None, half_core)
        found = run_processes(in_groups, 2, measure_layers, kinds, work, 1, False, tmp_path / "log")
        costs_on = {kind: each.costs for kind, each in zip(kinds, found, strict=True)}
        count = len(costs_on[None])
        plans = [planned(costs_on, order) for order in permutations(kinds)]
        step_s, cells, order = min(plans, key=lambda plan: plan[0])
        seconds = {
            (cut, each): measured_s(work, (cut, count - cut), each)
            for cut in range(1, count)
            for each in permutations(kinds)
        }
    best_s, chosen_s = min(seconds.values()), seconds[cells[0], order]
    equal_s = min(seconds[count // 2, each] for each in permutations(kinds))
    print(f"{cells}, planned {step_s:.3f} s: {chosen_s:.3f} s, best {best_s:.3f}, equal cut {equal_s:.3f}")
    assert chosen_s <= 1.05 * best_s
    assert equal_s >= 1.3 * chosen_s
