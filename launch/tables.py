"""``make table NAME=...``: computes or measures one of the paper's tables, prints it, and writes it down."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from experiments import batch_size
from experiments.amoebanet_memory import amoebanet_table
from experiments.amoebanet_speed import amoebanet_speeds, partition_table
from experiments.breakdown import breakdown_table
from experiments.image_workload import Classification
from experiments.memory_table import memory_table
from experiments.prediction import Round, Work, prediction_table
from experiments.results import read_results
from experiments.slow_links import slow_links_table
from experiments.table import Table
from experiments.throughput import Measurement, SleepingWork, efficiency_table, table_2, table_3
from experiments.transfer import transfer_table
from launch.decoding_speed import decoding_table
from launch.devices import this_machine
from launch.pricing import measured_price
from launch.progress import told_by_part
from launch.runs import CACHE, RUNS, RunFolder, find_run
from launch.slow_links import over_hosts
from suite.errors import SettingError, nearest
from suite.pipeline.costs import LayerCost
from suite.pipeline.memory import bytes_per_parameter
from suite.pipeline.plan import make_plan
from suite.pipeline.recipe import Recipe
from suite.training.trace import read_traces

FOLDER = RUNS / "tables"

SECONDS_A_CASE, FEWEST_STEPS, MOST_STEPS = 8.0, 3, 5

ROUNDS = 3
"""Of predicting and running in turn."""


def table(name: str, run: str, console: Console) -> None:
    """Prints a table and writes it as Markdown and CSV. Raises SettingError for an unknown name or run."""
    measure, report = _sleeper(console), told_by_part(f"table {name}", console.print)
    tables: dict[str, Callable[[], list[Table]]] = {
        "1": lambda: [memory_table(report), amoebanet_table(report)],
        "2": lambda: [table_2(measure, report), amoebanet_speeds(measure, _measured(console), report)],
        "3": lambda: [table_3(measure, report)],
        "4": lambda: [transfer_table(RUNS)],
        "5": lambda: _batch_sizes(),
        "partition": lambda: [partition_table(measure, _measured(console), report)],
        "efficiency": lambda: [efficiency_table(measure, report)],
        "slow_links": lambda: [slow_links_table(over_hosts(console, FOLDER))],
        "prediction": lambda: [prediction_table(_predictor(console))],
        "breakdown": lambda: [_breakdown(run)],
        "decoding": lambda: [decoding_table(run, console)],
    }
    if name not in tables:
        raise SettingError(f"no table is called {name!r}; {nearest(name, tables)}")
    for made in tables[name]():
        console.print(made.shown() if console.is_terminal else made.markdown())
        for path in made.write(FOLDER):
            console.print(f"written: {path}")


def _batch_sizes() -> list[Table]:
    """Table 5 at each scale that has runs of the sweep; without any, the paper's columns."""
    results = [
        read_results(scale, batch_size.SWEEP.members(scale, this_machine(), RUNS), RUNS)
        for scale in batch_size.SWEEP.scales
    ]
    return [batch_size.batch_table(one) for one in [one for one in results if one.runs] or results[:1]]


def _sleeper(console: Console) -> Callable[[SleepingWork], Measurement]:
    """Returns what measures a sleeping pipeline: its stages alone, then the executor's steps."""
    from launch.measure import Measured, Steps, measure_layers, measure_steps
    from launch.spawn import run_processes

    def measure(work: SleepingWork) -> Measurement:
        stages = work.pipeline.stages
        FOLDER.mkdir(parents=True, exist_ok=True)
        found: list[Measured] = run_processes(measure_layers, 1, work, 1, False, FOLDER / "measuring.log")
        alone = found[0].costs
        rough = (work.micro_batches + stages) * max(cost.seconds for cost in alone)
        count = max(FEWEST_STEPS, min(MOST_STEPS, int(SECONDS_A_CASE / rough)))
        console.print(f"K = {stages}, M = {work.micro_batches}: {count} steps of about {rough:.1f} s")
        steps: list[Steps] = run_processes(
            measure_steps, stages, work, (1,) * stages, Recipe.of(work.pipeline), count, 1, False
        )
        seconds = tuple(max(column) for column in zip(*(one.seconds for one in steps), strict=True))
        console.print(
            f"K = {stages}, M = {work.micro_batches}: {statistics.median(seconds):.3f} s a step ({count} steps, "
            f"{min(seconds):.3f} to {max(seconds):.3f})"
        )
        overheads = tuple(max(column) for column in zip(*(one.overheads for one in steps), strict=True))
        return Measurement(seconds, alone, overheads)

    return measure


def _measured(console: Console) -> Callable[[Classification], Sequence[LayerCost]]:
    """Returns what measures the layers of a workload in one process of one thread."""

    def costs(work: Classification) -> Sequence[LayerCost]:
        one = work.remade(work.experiment.with_settings("train.threads=1"))
        price = measured_price(one, replace(this_machine(), devices=1), CACHE / "costs", console.print, patience)
        if not price.measured:
            raise SettingError(f"this table is of measured costs, and here there are only estimates: {price.source}")
        return price.costs

    patience = 600.0
    return costs


def _predictor(console: Console) -> Callable[[Work], Sequence[Round]]:
    """Returns what plans a work from fresh costs and runs it, several times in turn."""
    from launch.measure import Steps, measure_steps
    from launch.spawn import run_processes

    machine = this_machine()

    def once(work: Work, at: int) -> Round:
        cache = FOLDER / "costs"
        for kept in cache.glob("*.json"):
            kept.unlink()  # each round measures anew

        price = measured_price(work, machine, cache, lambda text: None)
        process = price.machine.process
        each = bytes_per_parameter(work.optimizer, replicas=1)
        plan = make_plan(price.costs, len(price.costs), work.pipeline, each, price.machine)
        cells, stages = plan.cells, work.pipeline.stages
        steps: list[Steps] = run_processes(measure_steps, stages, work, cells, plan.recipe, 7, 1)
        weighed: list[Steps] = run_processes(measure_steps, stages, work, cells, plan.recipe, 0, 1, True, True)
        found = Round(
            plan.step_s,
            statistics.median(max(column) for column in zip(*(one.seconds for one in steps), strict=True)),
            tuple(stage.peak_bytes - process for stage in plan.stages),
            tuple(one.peak_bytes for one in weighed),
        )
        console.print(
            f"{work.name}, round {at + 1}: predicted {found.predicted_s:.3f} s, measured {found.measured_s:.3f} s"
        )
        return found

    return lambda work: [once(work, at) for at in range(ROUNDS)]


def _breakdown(asked: str) -> Table:
    run = find_run(asked) if asked else _newest_traced()
    traces = read_traces(run.traces)
    if not traces:
        raise SettingError(
            f"run {run.path} has no trace; make one that has: make experiment NAME={run.path.parent.name}"
        )
    cells = json.loads(run.plan_record.read_text())["cells"]
    return breakdown_table(f"{run.path.parent.name}/{run.path.name}", traces, cells)


def _newest_traced() -> RunFolder:
    folders = sorted(RUNS.glob("*/*/trace"), key=lambda path: path.stat().st_mtime)
    if not folders:
        raise SettingError(f"no run below {Path(RUNS)} has a trace yet; make experiment NAME=t128_6b makes one")
    return RunFolder(folders[-1].parent.resolve())
