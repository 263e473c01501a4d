"""``python -m tests.slow.schedules [NAME ...]``: schedule=auto beside the schedules of torch, in the memory that each
of them takes. Simulated, from costs estimated for H100s on 16 nodes of 8.

``python -m tests.slow.schedules front``: published schedules in equal units, beside what search finds in their memory.

Each schedule of torch gets the most even cut of the layers for its cells; auto gets the memory of its fullest stage.
"""

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

from experiments.base.cluster import Cluster, parse_cluster
from experiments.planning.problem import estimated_costs
from experiments.registry import find
from suite.errors import PlanError, SettingError
from suite.pipeline.model.cells import CellPlacement
from suite.pipeline.planning.devices import GIB
from suite.pipeline.planning.fit import Problem
from suite.pipeline.planning.lower_bound import lower_bound_s
from suite.pipeline.planning.memory import bytes_per_parameter
from suite.pipeline.planning.plan import make_plan
from suite.pipeline.planning.policies import CellsProblem
from suite.pipeline.planning.schedule_choice import search_schedule
from suite.pipeline.planning.search import Search
from suite.pipeline.planning.simulate import CellCost, Link, simulate
from suite.pipeline.planning.stage_bytes import CellBytes, peak_bytes
from suite.pipeline.schedule.action import Action
from suite.pipeline.schedule.config import ScheduleConfig
from suite.pipeline.schedule.csv_file import read_rows
from suite.pipeline.schedule.remat import UNLIMITED
from suite.settings import PipelineSettings
from tests.suite.pipeline.torch_schedules import KINDS, dump

CASES = (
    ("t12_400m", 4, 16, "train.batch_tokens=31250"),
    ("t24_1_3b_wide", 2, 8, "train.batch_tokens=15625"),
    ("t24_1_3b_wide", 8, 32, "train.batch_tokens=62500"),
    ("t48_1_3b_deep", 4, 16, "train.batch_tokens=31250"),
    ("t64_3b", 8, 32, "train.batch_tokens=62500"),
    ("t128_6b", 16, 64, "train.batch_tokens=125000"),
    ("amoebanet_imagenet", 4, 16, "train.batch_images=256"),
    ("transformer_103", 8, 32, ""),
    ("romance_strings", 2, 8, ""),
)
"""Run, K, M, and the settings with which a micro-batch is as large as in the paper's run."""

UNLIMITED_BYTES = 1 << 50


def compare(name: str, stages: int, micro_batches: int, settings: str):
    """Yields for each schedule of torch: its name, its step and largest stage, the step of auto in that memory."""
    given = f"pipeline.stages={stages} pipeline.replicas=1 pipeline.micro_batches={micro_batches}"
    work = find(name).with_settings(f"{given} pipeline.schedule=1f1b pipeline.remat=never {settings}".strip())
    cluster = parse_cluster("16x8xH100", Cluster(1, GIB, "cpu"))
    found = estimated_costs(work, cluster)
    each, costs = bytes_per_parameter(work.optimizer, 1), found.costs
    for kind, schedule in torch_schedules(stages, micro_batches):
        pipeline = PipelineSettings(stages=stages, micro_batches=micro_batches, remat="never", **schedule)
        try:
            theirs = make_plan(
                Problem(costs, pipeline, each, replace(found.machine, memory_limit_bytes=UNLIMITED_BYTES))
            )
        except (PlanError, SettingError) as fault:
            yield kind, None, None, None, str(fault)
            continue
        most = max(cell.peak_bytes for cell in theirs.cells)
        ours = pipeline.model_copy(
            update={"schedule": "auto", "schedule_rows": None, "virtual_stages": 1, "remat": "auto"}
        )
        asked = costs, ours, each, replace(found.machine, memory_limit_bytes=most)
        plan = search_schedule(make_plan(Problem(*asked)), Problem(*asked))
        yield kind, theirs.step_s, most, plan, ""


def torch_schedules(stages: int, micro_batches: int):
    """Yields the name and the settings of each schedule that torch has for K and M."""
    yield "GPipe", {"schedule": "fill_drain"}
    yield "1F1B", {"schedule": "1f1b"}
    with tempfile.TemporaryDirectory() as folder:
        for kind in KINDS:
            rows = read_rows(dump(kind, Path(folder) / "torch.csv", stages, micro_batches))
            yield kind, {"schedule": "csv", "schedule_rows": rows, "virtual_stages": 2}


def front(stages: int, micro_batches: int):
    """Yields for each published schedule, in units of time of half a stage (F = I = W = 1): its name, its idle units,
    the micro-batches that its fullest stage holds, and the idle units of the searched schedule that holds no more."""
    for name, cells in PUBLISHED:
        config = ScheduleConfig(name, (UNLIMITED,), cells)
        placement, schedule = config.placement(stages), config.actions(stages, micro_batches)
        costs, memory = units(placement, cells)
        flow = config.flow_control(stages)
        limit = max(peak_bytes(actions, own, flow) for actions, own in zip(schedule, memory, strict=True))
        theirs = simulate(schedule, costs, flow=flow, cell_to_stage=placement.cell_to_stage).seconds
        ours = []
        for other, own_cells in (("1f1b", 1), ("interleaved", 2), ("zbv", 2)):
            place = ScheduleConfig(other, virtual_stages=own_cells).placement(stages)
            costs, memory = units(place, own_cells)
            problem = CellsProblem(place, micro_batches, costs, Link(), memory, limit)
            search = Search(problem, lower_bound_s(problem))
            search.try_family()
            search.climb()
            ours += [search.step_s] if search.best is not None else []
        work = 6 * micro_batches
        held = max(map(held_micro_batches, schedule)) / cells
        yield name, theirs - work, held, min(ours, default=float("inf")) - work


def units(placement: CellPlacement, cells: int):
    """Returns the costs and the memory of the cells, where a cell holds as many bytes as it has halves of a stage."""
    size = 2 // cells
    cost = CellCost(size, size, 2 * size, weight_grad_s=size)
    memory = CellBytes(input_bytes=size)
    return [cost] * (cells * placement.stages), [[memory] * cells] * placement.stages


def held_micro_batches(actions: Sequence[Action]) -> int:
    """Returns the most cells that a stage holds a micro-batch of at once, from F to B or W."""
    return max(accumulate((action.kind == "F") - (action.kind in "BW") for action in actions))


PUBLISHED = (("1f1b", 1), ("zero_bubble", 1), ("zbv", 2), ("v_half", 2), ("v_min", 2))


def print_front() -> None:
    print("| K | M | schedule | holds micro-batches | idle units | searched in that memory: idle units |")
    print("|---|---|---|---|---|---|")
    for stages, micro_batches in ((4, 8), (4, 16), (8, 16), (8, 32), (16, 64)):
        for name, theirs, held, ours in front(stages, micro_batches):
            print(f"| {stages} | {micro_batches} | {name} | {held:g} | {theirs:g} | {ours:g} |", flush=True)


def main(names: list[str]) -> None:
    if names == ["front"]:
        print_front()
        return
    print("| run | K | M | schedule of torch | its step, s | memory, GiB | auto, s | auto is faster by | auto took |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name, stages, micro_batches, settings in CASES:
        if names and name not in names:
            continue
        for kind, theirs_s, most, plan, fault in compare(name, stages, micro_batches, settings):
            row = f"| `{name}` | {stages} | {micro_batches} | {kind} |"
            if plan is None:
                print(f"{row} - | - | - | - | {fault} |", flush=True)
                continue
            config = plan.schedule_config
            took = config.schedule + (f", {config.virtual_stages} cells" if config.virtual_stages > 1 else "")
            ahead = theirs_s / plan.step_s - 1
            print(f"{row} {theirs_s:.4f} | {most / GIB:.2f} | {plan.step_s:.4f} | {ahead:+.1%} | {took} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
