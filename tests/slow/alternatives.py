"""``python -m tests.slow.alternatives NAME [STEPS [WORKERS]]``: every useful pipeline of a run, planned and run.

It prints a table of planned and measured steps, how far the choice of ``pipeline=auto`` is from the fastest, the rank
correlation, and how many steps lie in the interval that the other runs give. With two workers it takes 15 to 50 minutes
on a quiet machine.
"""

import argparse
import json
import os
import statistics
import tempfile
from itertools import product
from pathlib import Path

import numpy as np

from suite.paths import read_json
from suite.training.metrics import read_steps
from tests.launch.command_line import gpipe, only_run

WARM_UPS = 5

SCHEDULES = (
    "fill_drain pipeline.remat=never", "fill_drain pipeline.remat=except_last", "1f1b pipeline.remat=never",
    "1f1b pipeline.remat=always", "zero_bubble pipeline.remat=never", "zbv pipeline.virtual_stages=2",
    "interleaved pipeline.virtual_stages=2 pipeline.remat=never",
    "zero_bubble pipeline.virtual_stages=2 pipeline.remat=never", "v_half pipeline.virtual_stages=2", "auto",
)  # fmt: skip


FEW = ("1f1b pipeline.remat=never", "zero_bubble pipeline.remat=never", "auto")
"""The schedules with more workers than two, where there are more shapes."""


def alternatives(workers: int) -> list[str]:
    """Returns the settings of K x R of at most so many workers, with useful M, schedules and recomputes."""
    powers = [1 << power for power in range(workers.bit_length())]
    factors, schedules, remats = ((1, 2, 4, 8), SCHEDULES, ("never", "except_last"))
    if workers > 2:
        factors, schedules, remats = (1, 4), FEW, ("never",)
    shapes = [
        *product([1], powers, factors, [f"pipeline.remat={remat}" for remat in remats]),
        *(
            (stages, replicas, factor * stages, f"pipeline.schedule={schedule}")
            for stages, replicas, factor, schedule in product(powers[1:], powers, factors, schedules)
            if stages * replicas <= workers
        ),
    ]
    return [
        f"pipeline.stages={stages} pipeline.replicas={replicas} pipeline.micro_batches={count} {rest}"
        for stages, replicas, count, rest in shapes
    ]


def run(name: str, settings: str, steps: int) -> tuple[dict, float]:
    """Runs an experiment; returns its plan and the median seconds of its steps but the first ones."""
    quiet = f"train.steps={steps} train.validate_every=none tracking.wandb=disabled trace=false"
    with tempfile.TemporaryDirectory() as folder:
        launcher = [] if "RAY_ADDRESS" in os.environ else ["--launcher", "local"]
        gpipe(folder, "experiment", name, *launcher, "--set", f"{settings} {quiet}")
        found = only_run(folder)
        lines = read_steps(found / "metrics.jsonl")
        seconds = [line["throughput/step_s"] for line in lines if "throughput/step_s" in line]
        return read_json(found / "plan.json"), statistics.median(seconds[WARM_UPS:])


def main(name: str, steps: int, workers: int) -> None:
    os.environ["GPIPE_CACHE"] = str(Path(os.environ.get("GPIPE_CACHE", ".cache")).resolve())
    if Path(name.partition(":")[0]).exists():
        name = str(Path(name).resolve())
    print("| K | R | M | settings | planned, ms | measured, ms | measured / planned |\n|---|---|---|---|---|---|---|")
    planned, measured = [], []
    for settings in [*alternatives(workers), "pipeline=auto"]:
        plan, seconds = run(name, settings, steps)
        planned.append(plan["step_s"])
        measured.append(seconds)
        shown = settings.partition("pipeline.schedule=")[2] or settings.rpartition(" ")[2]
        shape = f"| {plan['K']} | {plan['R']} | {plan['M']} | {shown}"
        print(f"{shape} | {1e3 * planned[-1]:.1f} | {1e3 * seconds:.1f} | {seconds / planned[-1]:.3f} |", flush=True)
    ratios = [seconds / plan_s for plan_s, seconds in zip(planned, measured, strict=True)]
    ranks = np.corrcoef(np.argsort(np.argsort(planned)), np.argsort(np.argsort(measured)))[0, 1]
    print(json.dumps({
        "settings": len(ratios),
        "choice over the fastest": measured[-1] / min(measured),
        "rank correlation": ranks,
        "median of measured / planned": statistics.median(ratios),
    }, indent=1))  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("steps", nargs="?", type=int, default=30)
    parser.add_argument("workers", nargs="?", type=int, default=2)
    main(**vars(parser.parse_args()))
