"""``make table NAME=...``: computes or measures one of the paper's tables, prints and writes it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from experiments.base.hints import command
from experiments.images.experiment import ImageExperiment
from experiments.report.table import Table
from experiments.sweeps import batch_size
from experiments.sweeps.report.results import read_results
from experiments.sweeps.transfer import transfer_table
from experiments.tables.breakdown import breakdown_table
from experiments.tables.paper_plans import paper_plans_table
from experiments.tables.prediction import PredictedModel, Round, prediction_table
from experiments.tables.table1_amoebanet import amoebanet_table
from experiments.tables.table1_transformer import memory_table
from experiments.tables.table2_amoebanet import amoebanet_speeds, partition_table
from experiments.tables.table2_transformer import Measurement, SleepingWork, efficiency_table, table_2, table_3
from experiments.tables.table3_slow_links import slow_links_table
from launch.backends.backend import LocalBackend
from launch.backends.processes import run_processes
from launch.benchmarks.decoding_speed import decoding_table
from launch.benchmarks.slow_links import layer_costs, over_hosts
from launch.planning.layer_costs import measure_costs
from launch.runs.store import CACHE, RUNS, RunFolder, find_run
from launch.tracking.progress import log_by_part
from launch.worker.devices import this_machine
from launch.worker.measure import Steps, measure_peak_bytes, measure_steps, slowest_s
from suite.errors import SettingError, nearest
from suite.paths import read_json
from suite.pipeline.planning.costs import LayerCost
from suite.pipeline.planning.memory import bytes_per_parameter
from suite.pipeline.planning.plan import make_plan
from suite.pipeline.schedule.config import ScheduleConfig
from suite.training.trace import read_traces

FOLDER = RUNS / "tables"

SECONDS_A_CASE, FEWEST_STEPS, MOST_STEPS = 8.0, 3, 5

ROUNDS = 3
"""Rounds of predicting and running, alternating."""


def table(name: str, run: str, console: Console) -> None:
    """Prints a table and writes it as Markdown and CSV. Raises SettingError for an unknown name or run."""
    measure, report = _synthetic_measurer(console), log_by_part(f"table {name}", console.print)
    tables: dict[str, Callable[[], list[Table]]] = {
        "1": lambda: [memory_table(report), amoebanet_table(report)],
        "2": lambda: [table_2(measure, report), amoebanet_speeds(measure, _cost_measurer(console), report)],
        "3": lambda: [table_3(measure, report)],
        "4": lambda: [transfer_table(RUNS)],
        "5": lambda: _batch_sizes(),
        "partition": lambda: [partition_table(measure, _cost_measurer(console), report)],
        "efficiency": lambda: [efficiency_table(measure, report)],
        "slow_links": lambda: [slow_links_table(over_hosts(console, FOLDER))],
        "paper_plans": lambda: [paper_plans_table(report)],
        "prediction": lambda: [prediction_table(_predictor(console))],
        "breakdown": lambda: [_breakdown(run)],
        "decoding": lambda: [decoding_table(run, console)],
    }
    if name not in tables:
        raise SettingError(f"unknown table {name!r}; {nearest(name, tables)}")
    for result_table in tables[name]():
        console.print(result_table.rich_table() if console.is_terminal else result_table.markdown())
        for path in result_table.write(FOLDER):
            console.print(f"written: {path}")


def _batch_sizes() -> list[Table]:
    """Returns table 5 at each scale with runs of the sweep; without runs, the paper's columns."""
    results = [
        read_results(scale, batch_size.SWEEP.members(scale, this_machine(), RUNS), RUNS)
        for scale in batch_size.SWEEP.scales
    ]
    return [batch_size.batch_table(one) for one in [one for one in results if one.runs] or results[:1]]


def _synthetic_measurer(console: Console) -> Callable[[SleepingWork], Measurement]:
    """Returns a function that measures a synthetic pipeline: its stages alone, then the executor's steps."""

    def measure(work: SleepingWork) -> Measurement:
        stages = work.pipeline.stages
        FOLDER.mkdir(parents=True, exist_ok=True)
        alone = layer_costs(work, FOLDER)
        estimate_s = (work.micro_batches + stages) * max(cost.seconds for cost in alone)
        count = max(FEWEST_STEPS, min(MOST_STEPS, int(SECONDS_A_CASE / estimate_s)))
        console.print(f"K = {stages}, M = {work.micro_batches}: {count} steps of about {estimate_s:.1f} s")
        steps: list[Steps] = run_processes(
            measure_steps, stages, work, (1,) * stages, ScheduleConfig.from_settings(work.pipeline), count, False
        )
        seconds = tuple(slowest_s(steps))
        console.print(
            f"K = {stages}, M = {work.micro_batches}: {statistics.median(seconds):.3f} s a step ({count} steps, "
            f"{min(seconds):.3f} to {max(seconds):.3f})"
        )
        overheads = tuple(max(column) for column in zip(*(one.overheads for one in steps), strict=True))
        return Measurement(seconds, alone, overheads)

    return measure


def _cost_measurer(console: Console) -> Callable[[ImageExperiment], Sequence[LayerCost]]:
    """Returns a function that measures a workload's layers in one process with one thread."""

    def costs(work: ImageExperiment) -> Sequence[LayerCost]:
        one = work.with_settings("train.threads=1")
        cost_model = measure_costs(
            one, replace(this_machine(), devices=1), CACHE / "costs", console.print, LocalBackend(), timeout_s=timeout_s
        )
        if not cost_model.measured:
            raise SettingError(
                f"this table needs measured costs, and only estimates are available: {cost_model.source}"
            )
        return cost_model.costs

    timeout_s = 600.0
    return costs


def _predictor(console: Console) -> Callable[[PredictedModel], Sequence[Round]]:
    """Returns a function that plans a work from newly measured costs and runs it, several times."""
    machine = this_machine()

    def plan_and_run(work: PredictedModel, at: int) -> Round:
        cache = FOLDER / "costs"
        for cached_file in cache.glob("*.json"):
            cached_file.unlink()  # each round measures anew

        cost_model = measure_costs(work, machine, cache, lambda text: None, LocalBackend())
        process = cost_model.machine.process_bytes
        parameter_bytes = bytes_per_parameter(work.optimizer, replicas=1)
        plan = make_plan(cost_model.costs, work.pipeline, parameter_bytes, cost_model.machine)
        cells, stages = plan.layers_per_cell, work.pipeline.stages
        steps: list[Steps] = run_processes(measure_steps, stages, work, cells, plan.schedule_config, 7)
        peaks: list[int] = run_processes(measure_peak_bytes, stages, work, cells, plan.schedule_config)
        found = Round(
            plan.step_s,
            statistics.median(slowest_s(steps)),
            tuple(stage.peak_bytes - process for stage in plan.cells),
            tuple(peaks),
        )
        console.print(
            f"{work.name}, round {at + 1}: predicted {found.predicted_s:.3f} s, measured {found.measured_s:.3f} s"
        )
        return found

    return lambda work: [plan_and_run(work, at) for at in range(ROUNDS)]


def _breakdown(asked: str) -> Table:
    run = find_run(asked) if asked else _newest_traced()
    traces = read_traces(run.traces)
    if not traces:
        raise SettingError(
            f"run {run.path} has no trace; start a run with one: {command('experiment', NAME=run.path.parent.name)}"
        )
    cells = (read_json(run.plan_record) or {})["cells"]
    mfu = (read_json(run.record) or {}).get("mfu")
    return breakdown_table(f"{run.path.parent.name}/{run.path.name}", traces, cells, mfu)


def _newest_traced() -> RunFolder:
    folders = sorted(RUNS.glob("*/*/trace"), key=lambda path: path.stat().st_mtime)
    if not folders:
        raise SettingError(
            f"no run in {Path(RUNS)} has a trace yet; start one with {command('experiment', NAME='t128_6b')}"
        )
    return RunFolder(folders[-1].parent.resolve())
