"""Plans of the paper's five translation runs on three declared clusters. Nothing runs: the times are simulated from
estimated layer costs, the bytes are computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from experiments.base.cluster import Cluster, parse_cluster
from experiments.planning.fewer_devices import limit_replicas_to_cluster
from experiments.planning.plan_report import PlanReport
from experiments.planning.planner import plan_workload
from experiments.planning.single_plan import estimated_costs
from experiments.report.table import ReportProgress, Table, Value
from experiments.translation.experiment import TranslationExperiment
from experiments.translation.runs import MULTILINGUAL_RUNS
from suite.errors import PlanError
from suite.pipeline.planning.devices import GIB

CLUSTERS = ("16x16GiB", "2x8xH100", "16x8xH100")
AUTO = "pipeline.micro_batches=auto"

HEADINGS = (
    "cluster", "experiment", "fits", "K", "R", "devices used", "M", "tokens a micro-batch", "tokens a step",
    "schedule", "bubble (simulated)", "fullest device GiB (computed)", "limit GiB", "hours, least (simulated)",
    "hours, most (simulated)",
)  # fmt: skip

NOTES = (
    "Simulated from estimated layer costs: nothing ran. The hours are those of 100,000 steps, with matrix products at "
    "70% (least) and 30% (most) of the device's peak. This range is a choice, not a measurement.",
    "The limit is the device's memory minus a reserve of 5% (pipeline.memory_reserve).",
    "Each run has the paper's K (t12_400m: ours, none is printed) and its own schedule; R is 8, "
    "or as many replicas as the cluster holds. The plan chose "
    "M (pipeline.micro_batches=auto): the fastest step by the simulation.",
    "Below a run that does not fit stands the nearest plan that the suite finds, with the settings that make it.",
    "16x16GiB: one group of 16 devices with the memory, speed and links of a TPUv3 core. H100: 79 GiB, NVLink 4 inside "
    "a node, one port of 200 Gbit/s a device between nodes.",
)


def paper_plans_table(
    report: ReportProgress,
    runs: Sequence[Callable[[], TranslationExperiment]] = MULTILINGUAL_RUNS,
    clusters: Sequence[str] = CLUSTERS,
) -> Table:
    """Returns a row for each run on each cluster, and one more for the suggestion where a run does not fit."""
    rows: list[list[Value]] = []
    pairs = [(cluster, run()) for cluster in clusters for run in runs]
    for done, (name, run) in enumerate(pairs):
        report(done, len(pairs), f"{run.name} on {name}")
        cluster = parse_cluster(name, Cluster(1, GIB, "cpu"))
        rows += [[name, run.name, *values] for values in _rows(run, cluster)]
    return Table("paper-plans", "Plans of the paper's five translation runs on three clusters", HEADINGS, rows, NOTES)


def _rows(run: TranslationExperiment, cluster: Cluster) -> list[list[Value]]:
    work, notes = limit_replicas_to_cluster(run.with_settings(AUTO), cluster)
    pipeline = work.pipeline
    given = f"{AUTO} pipeline.replicas={pipeline.replicas}" if notes else AUTO
    try:
        return [_row("yes", plan_workload(work, cluster, estimated_costs, notes, given))]
    except PlanError as fault:
        used = pipeline.stages * pipeline.replicas
        missing: list[Value] = [f"no: {fault.errors[0]}", pipeline.stages, pipeline.replicas, used]
        missing += [None] * (len(HEADINGS) - 2 - len(missing))
        if not fault.remedy:
            return [missing]
        settings = fault.remedy.split('"')[1]
        planned = plan_workload(run.with_settings(settings), cluster, estimated_costs)
        return [missing, _row(f"suggested: {settings}", planned)]


def _row(fits: str, planned: PlanReport) -> list[Value]:
    plan, work = planned.plan, planned.experiment
    pipeline, interval = plan.pipeline, planned.hours_interval
    assert interval is not None, "declared devices have estimated costs"
    return [
        fits, pipeline.stages, pipeline.replicas, pipeline.stages * pipeline.replicas, pipeline.micro_batches,
        work.batch // (pipeline.replicas * pipeline.micro_batches), work.batch, plan.schedule_config.schedule,
        plan.timeline.bubble, max(cell.peak_bytes for cell in plan.cells) / GIB,
        plan.machine.memory_limit_bytes / GIB, *interval,
    ]  # fmt: skip
