"""``python -m tests.slow.schedules [NAME ...]``: schedule=auto beside the schedules of torch, in the memory that each
of them takes. Simulated, from costs estimated for H100s on 16 nodes of 8.

Each schedule of torch gets the most even cut of the layers for its cells; auto gets the memory of its fullest stage.
"""

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from experiments.base.cluster import Cluster, parse_cluster
from experiments.planning.planner import estimated_costs
from experiments.registry import find
from suite.errors import PlanError, SettingError
from suite.pipeline.planning.devices import GIB
from suite.pipeline.planning.memory import bytes_per_parameter
from suite.pipeline.planning.plan import make_plan
from suite.pipeline.planning.schedule_choice import search_schedule
from suite.pipeline.schedule.csv_file import read_rows
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
            theirs = make_plan(costs, pipeline, each, replace(found.machine, memory_limit_bytes=UNLIMITED_BYTES))
        except (PlanError, SettingError) as fault:
            yield kind, None, None, None, str(fault)
            continue
        most = max(cell.peak_bytes for cell in theirs.cells)
        ours = pipeline.model_copy(
            update={"schedule": "auto", "schedule_rows": None, "virtual_stages": 1, "remat": "auto"}
        )
        asked = costs, ours, each, replace(found.machine, memory_limit_bytes=most)
        plan = search_schedule(make_plan(*asked), *asked)
        yield kind, theirs.step_s, most, plan, ""


def torch_schedules(stages: int, micro_batches: int):
    """Yields the name and the settings of each schedule that torch has for K and M."""
    yield "GPipe", {"schedule": "fill_drain"}
    yield "1F1B", {"schedule": "1f1b"}
    with tempfile.TemporaryDirectory() as folder:
        for kind in KINDS:
            rows = read_rows(dump(kind, Path(folder) / "torch.csv", stages, micro_batches))
            yield kind, {"schedule": "csv", "schedule_rows": rows, "virtual_stages": 2}


def main(names: list[str]) -> None:
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
