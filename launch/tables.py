"""``make table NAME=...``: computes or measures one of the paper's tables, prints and writes it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from rich.console import Console

from experiments.base.hints import command
from experiments.images.experiment import ImageExperiment
from experiments.report.table import Table
from experiments.sweeps import batch_size, transfer
from experiments.tables.breakdown import breakdown_table
from experiments.tables.table1 import amoebanet_table, transformer_table
from experiments.tables.table2 import Measurement, SleepingWork, amoebanet_speeds, table_2, table_3
from launch.backends.processes import run_processes
from launch.planning.layer_costs import MeasuredCosts
from launch.runs.store import CACHE, RUNS, RunFolder, find_run
from launch.tracking.progress import log_by_part
from launch.worker import measure
from launch.worker.devices import cores, this_machine
from launch.worker.run_plan import RunPlan
from suite.errors import SettingError
from suite.log import Log
from suite.paths import read_json
from suite.pipeline.planning.costs import LayerCost
from suite.pipeline.planning.devices import DEVICES
from suite.pipeline.planning.estimate import estimate
from suite.pipeline.schedule.config import ScheduleConfig
from suite.training.trace import read_traces

FOLDER = RUNS / "tables"

SECONDS_A_CASE, FEWEST_STEPS, MOST_STEPS = 8.0, 3, 5


def table(name: str, run: str, console: Console) -> None:
    """Prints one of ``catalog.TABLES``, and writes it as Markdown and CSV. Raises SettingError for an unknown run."""
    log: Log = console.print
    report = log_by_part(f"table {name}", log)
    step_of = partial(_measure_step, log=log)
    tables: dict[str, Callable[[], list[Table]]] = {
        "1": lambda: [transformer_table(report), amoebanet_table(report)],
        "2": lambda: [table_2(step_of, report), amoebanet_speeds(step_of, partial(_costs, log=log), report)],
        "3": lambda: [table_3(step_of, report)],
        "4": lambda: [transfer.transfer_table(transfer.SWEEP.results("", this_machine(), RUNS))],
        "5": _batch_sizes,
        "breakdown": lambda: [_breakdown(run)],
    }
    for result_table in tables[name]():
        console.print(result_table.rich_table() if console.is_terminal else result_table.markdown())
        for path in result_table.write(FOLDER):
            console.print(f"written: {path}")


def _batch_sizes() -> list[Table]:
    """Returns table 5 at each scale with runs of the sweep; without runs, the paper's columns."""
    sweep = batch_size.SWEEP
    results = [sweep.results(scale, this_machine(), RUNS) for scale in sweep.scales]
    return [batch_size.batch_table(one) for one in [one for one in results if one.runs] or results[:1]]


def _measure_step(work: SleepingWork, log: Log) -> Measurement:
    """Measures a pipeline of sleeping layers: its stages alone, in one process, then the executor's steps."""
    stages = work.pipeline.stages
    case = f"K = {stages}, M = {work.micro_batches}"
    FOLDER.mkdir(parents=True, exist_ok=True)
    estimated = estimate(*work.build(), work.sample().largest, DEVICES["TPUv3"], work.optimizer)
    alone = run_processes(measure.measure_layers, 1, work, estimated, 1, False, FOLDER / "measuring.log")[0].costs
    estimate_s = (work.micro_batches + stages) * max(cost.seconds for cost in alone)
    count = max(FEWEST_STEPS, min(MOST_STEPS, int(SECONDS_A_CASE / estimate_s)))
    log(f"{case}: {count} steps of about {estimate_s:.1f} s")
    run = measure.MeasuredPipeline(work, (1,) * stages, ScheduleConfig.from_settings(work.pipeline))
    seconds = tuple(measure.slowest_s(run_processes(measure.measure_steps, stages, run, count, False)))
    log(f"{case}: {statistics.median(seconds):.3f} s a step ({count} steps, {min(seconds):.3f} to {max(seconds):.3f})")
    return Measurement(seconds, alone)


def _costs(work: ImageExperiment, log: Log) -> Sequence[LayerCost]:
    """Measures a workload's layers in one process with one thread."""
    one, machine = work.with_settings("train.threads=1"), replace(cores(), devices=1)
    found = MeasuredCosts(CACHE / "costs", log, timeout_s=600.0)(one, machine)
    if not found.measured:
        raise SettingError(f"this table needs measured costs, and only estimates are available: {found.source}")
    return found.costs


def _breakdown(requested: str) -> Table:
    run = find_run(requested) if requested else _newest_traced()
    traces, name = read_traces(run.trace_folder), run.path.parent.name
    if not traces:
        raise SettingError(f"run {run.path} has no trace; start a run with one: {command('experiment', NAME=name)}")
    plan, mfu = RunPlan.read(run.plan_json), (read_json(run.record) or {}).get("mfu")
    cell_to_stage = plan.schedule_config.cell_to_stage(len(traces[0].timeline.rows))
    return breakdown_table(f"{name}/{run.path.name}", traces, plan.cells, mfu, cell_to_stage)


def _newest_traced() -> RunFolder:
    newest_first = sorted(RUNS.glob("*/*/trace"), key=lambda path: -path.stat().st_mtime)
    traced = next((folder for folder in newest_first if read_traces(folder)), None)
    if traced is None:
        raise SettingError(f"no run in {RUNS} has a trace yet; start one with {command('experiment', NAME='t128_6b')}")
    return RunFolder(traced.parent.resolve())
