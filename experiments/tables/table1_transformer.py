"""Table 1: the largest models that fit, computed by the planner's memory model. Nothing is run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from experiments.base.cluster import Cluster
from experiments.planning.planner import estimated_costs
from experiments.report.paper import printed
from experiments.report.table import Report, Table, Value, silent
from experiments.translation.language_model import BATCH, LanguageModel
from models.language_model import LanguageModelShape
from suite.pipeline.planning.costs import LayerCost
from suite.pipeline.planning.devices import DEVICES, GIB
from suite.pipeline.planning.memory import InFlightPeaks, MemoryModel, bytes_per_parameter, peak_bytes
from suite.pipeline.planning.partition import cell_ranges, fewest_stages, partition
from suite.pipeline.schedule.action import Schedule
from suite.pipeline.schedule.config import ScheduleConfig
from suite.settings import OptimizerSettings, PipelineSettings


@dataclass(frozen=True)
class Column:
    """One device column of the table."""

    name: str
    pipeline: PipelineSettings


def columns(model: str, batch: int) -> list[Column]:
    """Returns the paper's columns: naive runs the whole batch without recompute; pipelines use micro-batches of 1."""
    numbers = printed(f"table1.{model}")
    naive = PipelineSettings(stages=1, micro_batches=1, remat="never")
    return [
        Column(name, naive if name.startswith("Naive") else PipelineSettings(stages=stages, micro_batches=batch))
        for name, stages in zip(numbers["columns"], numbers["K"], strict=True)
    ]


def memory_table(report: Report = silent) -> Table:
    """Returns the table, for this suite's bytes per parameter and for the paper's 12."""
    numbers = printed("table1.transformer")
    ours = bytes_per_parameter(OptimizerSettings(), replicas=1)
    rows: list[list[Value]] = []
    cases = columns("transformer", BATCH)
    for each in (numbers["bytes_per_parameter"], ours):
        for at, column in enumerate(cases):
            report(len(rows), 2 * len(cases), f"Transformer, {column.name}, {each:g} bytes per parameter")
            rows.append([*_row(column, each, numbers["device_gib"] * GIB), *_printed(numbers, at)])
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


def _printed(numbers: dict[str, list[float]], at: int) -> list[Value]:
    return [numbers["parameters"][at], numbers["parameter_gib"][at], numbers["activation_gib"][at]]


def _row(column: Column, each: float, limit: int) -> list[Value]:
    numbers = printed("table1.transformer")
    printed_layers = numbers["L"][numbers["columns"].index(column.name)]
    kinds = _kinds(column.pipeline)
    most = largest_model(kinds, column.pipeline, each, limit)
    costs = stack(kinds, most)
    peaks = fit(costs, column.pipeline, each, limit)
    parameters = sum(cost.parameters for cost in costs)
    standing = each * parameters
    return [
        column.name, each, most, parameters, standing / GIB, (sum(peaks) - standing) / GIB, max(peaks) / GIB,
        limit / GIB, printed_layers, most / printed_layers,
    ]  # fmt: skip


def _kinds(pipeline: PipelineSettings) -> tuple[LayerCost, LayerCost, LayerCost]:
    """Returns the costs of the embedding, of a block and of the head."""
    one = LanguageModel(LanguageModelShape(layers=1), pipeline.model_copy(update={"stages": 1}))
    costs = estimated_costs(one, Cluster(1, DEVICES["TPUv3"].memory_bytes, "gpu", device=DEVICES["TPUv3"])).costs
    return costs[0], costs[1], costs[2]


def stack(kinds: tuple[LayerCost, LayerCost, LayerCost], layers: int) -> list[LayerCost]:
    """Returns the costs of a Transformer-L."""
    return [kinds[0], *[kinds[1]] * layers, kinds[2]]


def largest_model(
    kinds: tuple[LayerCost, LayerCost, LayerCost], pipeline: PipelineSettings, each: float, limit: int
) -> int:
    """Returns the largest number of blocks that fits."""
    return largest(lambda layers: fits(stack(kinds, layers), pipeline, each, limit))


def largest(fitting: Callable[[int], bool]) -> int:
    """Returns the largest fitting number by bisection; every smaller number must fit too."""
    least, most = 0, 1
    while fitting(most):
        least, most = most, 2 * most
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (middle, most) if fitting(middle) else (least, middle)
    return least


def fits(costs: Sequence[LayerCost], pipeline: PipelineSettings, each: float, limit: int) -> bool:
    """Returns whether some partition into that many stages stays within the limit."""
    sizes = MemoryModel(costs, _in_flight(pipeline), each)
    fewest = fewest_stages(sizes.furthest_end(limit))
    return fewest is not None and fewest <= pipeline.stages


def fit(costs: Sequence[LayerCost], pipeline: PipelineSettings, each: float, limit: int) -> list[int]:
    """Returns the peak bytes of each cell in the fastest partition that fits."""
    sizes = MemoryModel(costs, _in_flight(pipeline), each)
    cells = cell_ranges(
        partition([cost.seconds for cost in costs], pipeline.stages, sizes.furthest_end(limit)), len(costs)
    )
    actions = _actions(pipeline)[0]
    return [peak_bytes(actions, sizes.in_partition(cells, k)) for k in range(len(cells))]


def _actions(pipeline: PipelineSettings) -> Schedule:
    """Returns the actions of every stage; fill-drain's are equal."""
    return ScheduleConfig.from_settings(pipeline).actions(1, pipeline.micro_batches)


def _in_flight(pipeline: PipelineSettings) -> InFlightPeaks:
    return InFlightPeaks.of(_actions(pipeline), pipeline.micro_batches)
