"""Table 1: the largest models that fit, computed by the planner's memory model. Nothing is run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from experiments.base.cluster import Cluster
from experiments.language_model.runs import SEQUENCES as BATCH
from experiments.language_model.runs import language_model
from experiments.planning.planner import estimated_costs
from experiments.report.paper import paper_numbers
from experiments.report.table import ReportProgress, Table, Value, silent
from models.language_model import LanguageModelShape
from suite.pipeline.planning.costs import LayerCost
from suite.pipeline.planning.devices import DEVICES, GIB
from suite.pipeline.planning.memory import MemoryModel, bytes_per_parameter
from suite.pipeline.planning.partition import cell_ranges, fewest_stages, partition
from suite.pipeline.planning.stage_memory import InFlightPeaks, peak_bytes
from suite.pipeline.schedule.action import Schedule
from suite.pipeline.schedule.config import ScheduleConfig
from suite.settings import OptimizerSettings, PipelineSettings


@dataclass(frozen=True)
class Column:
    name: str
    pipeline: PipelineSettings


def columns(model: str, batch: int) -> list[Column]:
    """Returns the paper's columns: naive runs the whole batch without recompute; pipelines use micro-batches of 1."""
    numbers = paper_numbers(f"table1.{model}")
    naive = PipelineSettings(stages=1, micro_batches=1, remat="never")
    return [
        Column(name, naive if name.startswith("Naive") else PipelineSettings(stages=stages, micro_batches=batch))
        for name, stages in zip(numbers["columns"], numbers["K"], strict=True)
    ]


def memory_table(report: ReportProgress = silent) -> Table:
    """Returns the table, for this suite's bytes per parameter and for the paper's 12."""
    numbers = paper_numbers("table1.transformer")
    ours = bytes_per_parameter(OptimizerSettings(), replicas=1)
    rows = each_row("transformer", BATCH, ours, report, _row)
    headings = (
        "devices", "bytes per parameter", "largest L (computed)", "parameters (computed)", "parameters GiB (computed)",
        "peak activations GiB (computed)", "fullest device GiB (computed)", "limit GiB", "L (paper)", "ratio of L",
        "parameters (paper)", "parameters GiB (paper)", "peak activations GiB (paper)",
    )  # fmt: skip
    notes = [
        f"Batch {BATCH} sequences of 1024, fp32; with a pipeline M = {BATCH}, the last micro-batch not recomputed.",
        "GiB are sums over devices, except for the fullest. Activations are all memory that is not for parameters.",
        f"The paper has 12 bytes: a weight and two optimizer values. This suite has {ours:.0f}: weight, gradient, two "
        "moments; gradients stay allocated because micro-batches accumulate into them.",
        numbers["note"],
    ]
    return Table("table-1", "Table 1, Transformer-L: the largest model that fits", headings, rows, notes)


def each_row(
    model: str, batch: int, ours: float, report: ReportProgress, row: Callable[[int, Column, float, int], list[Value]]
) -> list[list[Value]]:
    """Returns ``row(column's number, column, bytes per parameter, limit)`` of each column, for the paper's bytes per
    parameter and for ours."""
    numbers, cases = paper_numbers(f"table1.{model}"), columns(model, batch)
    rows: list[list[Value]] = []
    for bytes_each in (numbers["bytes_per_parameter"], ours):
        for at, column in enumerate(cases):
            report(len(rows), 2 * len(cases), f"{model}, {column.name}, {bytes_each:g} bytes per parameter")
            rows.append(row(at, column, bytes_each, numbers["device_gib"] * GIB))
    return rows


def sizes(
    costs: Sequence[LayerCost], pipeline: PipelineSettings, bytes_each: float, limit: int, unit: int
) -> list[Value]:
    """Returns parameters, their bytes and those of activations in ``unit``, the fullest device and the limit in GiB."""
    peaks = cell_peaks(costs, pipeline, bytes_each, limit)
    parameters = sum(cost.parameters for cost in costs)
    held_bytes = bytes_each * parameters
    return [parameters, held_bytes / unit, (sum(peaks) - held_bytes) / unit, max(peaks) / GIB, limit / GIB]


def _row(at: int, column: Column, bytes_each: float, limit: int) -> list[Value]:
    numbers, pipeline = paper_numbers("table1.transformer"), column.pipeline
    work = language_model(LanguageModelShape(layers=1), pipeline.model_copy(update={"stages": 1}))
    cluster = Cluster(1, DEVICES["TPUv3"].memory_bytes, "gpu", device=DEVICES["TPUv3"])
    embedding, block, head = estimated_costs(work, cluster).costs

    def costs(layers: int) -> list[LayerCost]:
        return [embedding, *[block] * layers, head]

    most = largest(lambda layers: fits(costs(layers), pipeline, bytes_each, limit))
    return [
        column.name, bytes_each, most, *sizes(costs(most), pipeline, bytes_each, limit, GIB), numbers["L"][at],
        most / numbers["L"][at], numbers["parameters"][at], numbers["parameter_gib"][at], numbers["activation_gib"][at],
    ]  # fmt: skip


def largest(fitting: Callable[[int], bool]) -> int:
    """Returns the largest fitting number by bisection; every smaller number must fit too."""
    least, most = 0, 1
    while fitting(most):
        least, most = most, 2 * most
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (middle, most) if fitting(middle) else (least, middle)
    return least


def fits(costs: Sequence[LayerCost], pipeline: PipelineSettings, bytes_each: float, limit: int) -> bool:
    """Returns whether some partition into that many stages stays within the limit."""
    memory = MemoryModel(costs, _in_flight(pipeline), bytes_each)
    fewest = fewest_stages(memory.furthest_end(limit))
    return fewest is not None and fewest <= pipeline.stages


def cell_peaks(costs: Sequence[LayerCost], pipeline: PipelineSettings, bytes_each: float, limit: int) -> list[int]:
    """Returns the peak bytes of each cell in the fastest partition that fits."""
    memory = MemoryModel(costs, _in_flight(pipeline), bytes_each)
    layers = partition([cost.seconds for cost in costs], pipeline.stages, memory.furthest_end(limit))
    cells = cell_ranges(layers, len(costs))
    actions = _actions(pipeline)[0]
    return [peak_bytes(actions, memory.in_partition(cells, k)) for k in range(len(cells))]


def _actions(pipeline: PipelineSettings) -> Schedule:
    """Returns the actions of every stage; fill-drain's are equal."""
    return ScheduleConfig.from_settings(pipeline).actions(1, pipeline.micro_batches)


def _in_flight(pipeline: PipelineSettings) -> InFlightPeaks:
    return InFlightPeaks.of(_actions(pipeline), pipeline.micro_batches)
