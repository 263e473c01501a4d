"""Plans of the paper's five translation runs on declared clusters. Nothing runs: the times are simulated from
estimated layer costs, the bytes are computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from experiments.base.cluster import Cluster, parse_cluster
from experiments.planning.best import best_plans, settings_of
from experiments.planning.fewer_devices import limit_replicas_to_cluster
from experiments.planning.plan_report import PlanReport
from experiments.planning.single_plan import estimated_costs, try_plan, with_step_interval
from experiments.report.table import ReportProgress, Table, Value
from experiments.translation.experiment import TranslationExperiment
from experiments.translation.runs import MULTILINGUAL_RUNS
from suite.errors import PlanError
from suite.pipeline.planning.devices import GIB

CLUSTERS = ("16x16GiB", "8xH100", "2x8xH100", "16x8xH100")
AUTO = "pipeline.micro_batches=auto"

HEADINGS = (
    "cluster", "experiment", "plan", "K", "R", "devices used", "M", "tokens a micro-batch", "tokens a step",
    "schedule", "bubble (simulated)", "fullest device GiB (computed)", "limit GiB", "hours, least (simulated)",
    "hours, most (simulated)",
)  # fmt: skip

NOTES = (
    "Simulated from estimated layer costs: nothing ran. The hours are those of 100,000 steps, with matrix products at "
    "70% (least) and 30% (most) of the device's peak. This range is a choice, not a measurement.",
    "The limit is the device's memory minus a reserve of 5% (pipeline.memory_reserve).",
    "A paper's plan has the paper's K (t12_400m: ours, none is printed) and its schedule; R is 8, or as many replicas "
    "as the cluster holds, and the plan chose M (pipeline.micro_batches=auto). Below it stands the fastest plan "
    "(BEST=1), with the settings that make it.",
    "16x16GiB: one group of 16 devices with the memory, speed and links of a TPUv3 core. H100: 79 GiB, NVLink 4 inside "
    "a node, one port of 200 Gbit/s a device between nodes.",
)


def paper_plans_table(
    report: ReportProgress,
    runs: Sequence[Callable[[], TranslationExperiment]] = MULTILINGUAL_RUNS,
    clusters: Sequence[str] = CLUSTERS,
) -> Table:
    """Returns two rows for each run on each cluster: with the paper's K, and the fastest plan."""
    rows: list[list[Value]] = []
    pairs = [(cluster, run()) for cluster in clusters for run in runs]
    for done, (name, run) in enumerate(pairs):
        report(done, len(pairs), f"{run.name} on {name}")
        cluster = parse_cluster(name, Cluster(1, GIB, "cpu"))
        rows += [[name, run.name, *values] for values in _rows(run, cluster)]
    return Table("paper-plans", "Plans of the paper's five translation runs on four clusters", HEADINGS, rows, NOTES)


def _rows(run: TranslationExperiment, cluster: Cluster) -> list[list[Value]]:
    work, _ = limit_replicas_to_cluster(run.with_settings(AUTO), cluster)
    pipeline = work.pipeline
    try:
        own = _row("the paper's", with_step_interval(try_plan(work, cluster, estimated_costs)))
    except PlanError as fault:
        own = [f"does not fit: {fault.errors[0]}", pipeline.stages, pipeline.replicas]
        own += [None] * (len(HEADINGS) - 2 - len(own))
    try:
        best = best_plans(run, cluster, estimated_costs, "")[0]
    except PlanError as fault:
        return [own, [f"none fits: {fault.errors[0]}", *[None] * (len(HEADINGS) - 3)]]
    return [own, _row(f"fastest: {settings_of(best, run)}", best)]


def _row(name: str, planned: PlanReport) -> list[Value]:
    plan, work = planned.plan, planned.experiment
    pipeline, interval = plan.pipeline, planned.hours_interval
    assert interval is not None, "declared devices have estimated costs"
    return [
        name, pipeline.stages, pipeline.replicas, pipeline.stages * pipeline.replicas, pipeline.micro_batches,
        work.batch // (pipeline.replicas * pipeline.micro_batches), work.batch, plan.schedule_config.schedule,
        plan.timeline.bubble, max(cell.peak_bytes for cell in plan.cells) / GIB,
        plan.machine.memory_limit_bytes / GIB, *interval,
    ]  # fmt: skip
