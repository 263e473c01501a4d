"""Table 1: the largest models that fit, computed by the planner's memory model. Nothing is run."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cache

from experiments.base.cluster import Cluster
from experiments.base.experiment import Experiment
from experiments.images.runs import TABLE_BATCH, TABLE_SIZE, find_amoebanet
from experiments.language_model.runs import SEQUENCES, language_model
from experiments.planning.problem import estimated_costs
from experiments.report.paper import paper_numbers
from experiments.report.table import ReportProgress, Table, Value
from models.shape import LanguageModelShape
from suite.pipeline.model.cells import CellPlacement
from suite.pipeline.planning.costs import LayerCost
from suite.pipeline.planning.devices import DEVICES, GIB
from suite.pipeline.planning.memory import UNCOUNTED_BYTES, CellBound, MemoryModel, bytes_per_parameter
from suite.pipeline.planning.partition import cell_ranges, fewest_cells, partition
from suite.pipeline.planning.stage_bytes import peak_bytes, peak_terms
from suite.pipeline.schedule.action import Action
from suite.pipeline.schedule.config import ScheduleConfig
from suite.pipeline.schedule.flow_control import GLOO
from suite.settings import OptimizerSettings, PipelineSettings

STEP = 16
"""Widths of AmoebaNet are multiples of 16, as in the paper."""

GB = 10**9

Costs = Sequence[LayerCost]


def transformer_table(report: ReportProgress) -> Table:
    """Returns Transformer-L, the deepest models: for this suite's bytes per parameter and for the paper's 12."""
    numbers = paper_numbers("table1.transformer")
    ours = bytes_per_parameter(OptimizerSettings(), replicas=1)

    def row(at: int, pipeline: PipelineSettings, bytes_each: float, limit: int) -> list[Value]:
        work = language_model(LanguageModelShape(blocks_per_stack=1), pipeline.model_copy(update={"stages": 1}))
        embedding, block, head = _estimated(work, "TPUv3")

        def costs(layers: int) -> Costs:
            return [embedding, *[block] * layers, head]

        most = largest(lambda layers: fits(costs(layers), pipeline, bytes_each, limit))
        return [
            most, *sizes(costs(most), pipeline, bytes_each, limit, GIB), numbers["L"][at], most / numbers["L"][at],
            numbers["parameters"][at], numbers["parameter_gib"][at], numbers["activation_gib"][at],
        ]  # fmt: skip

    headings = (
        "devices", "bytes per parameter", "largest L (computed)", "parameters (computed)", "parameters GiB (computed)",
        "peak activations GiB (computed)", "fullest device GiB (computed)", "limit GiB", "L (paper)", "ratio of L",
        "parameters (paper)", "parameters GiB (paper)", "peak activations GiB (paper)",
    )  # fmt: skip
    notes = [
        f"Batch {SEQUENCES} sequences of 1024, fp32; with a pipeline M = {SEQUENCES}, the last micro-batch not "
        "recomputed.",
        "GiB are sums over devices, except for the fullest. Activations are all memory that is not for parameters.",
        f"The paper has 12 bytes: a weight and two optimizer values. This suite has {ours:.0f}: weight, gradient, two "
        "moments; gradients stay allocated because micro-batches accumulate into them.",
        numbers["note"],
    ]
    title = "Table 1, Transformer-L: the largest model that fits"
    return Table("table-1", title, headings, _rows("transformer", SEQUENCES, ours, report, row), notes)


def amoebanet_table(report: ReportProgress) -> Table:
    """Returns AmoebaNet-D, the widest models at the paper's depths."""
    numbers = paper_numbers("table1.amoebanet")
    ours = bytes_per_parameter(OptimizerSettings(name="rmsprop"), replicas=1)

    def row(at: int, pipeline: PipelineSettings, bytes_each: float, limit: int) -> list[Value]:
        layers, printed, rows = numbers["L"][at], numbers["D"][at], TABLE_BATCH // pipeline.micro_batches

        def fitting(steps: int) -> bool:
            return fits(amoebanet_costs(layers, STEP * steps, rows), pipeline, bytes_each, limit)

        most = STEP * largest(fitting)
        return [
            layers, most, *sizes(amoebanet_costs(layers, most, rows), pipeline, bytes_each, limit, GB), printed,
            most / printed, numbers["parameters"][at], numbers["parameter_gb"][at], numbers["activation_gb"][at],
        ]  # fmt: skip

    headings = (
        "devices", "bytes per parameter", "L", "largest D (computed)", "parameters (computed)",
        "parameters GB (computed)", "peak activations GB (computed)", "fullest device GiB (computed)", "limit GiB",
        "D (paper)", "ratio of D", "parameters (paper)", "parameters GB (paper)", "peak activations GB (paper)",
    )  # fmt: skip
    naive = columns("amoebanet", TABLE_BATCH)[0][1]
    naive_costs = amoebanet_costs(numbers["L"][0], numbers["D"][0], TABLE_BATCH)
    naive_bytes = max(cell_peaks(naive_costs, naive, numbers["bytes_per_parameter"], 2**62))
    notes = [
        f"Mini-batch {TABLE_BATCH} images of {TABLE_SIZE} x {TABLE_SIZE}, fp32; with a pipeline M = {TABLE_BATCH}, "
        f"the last micro-batch not recomputed. L is the paper's, D the largest multiple of {STEP} that fits.",
        "GB are sums over devices. Activations are all memory that is not for parameters: the saved inputs of each "
        "micro-batch, skips included, activations and gradients of one micro-batch, messages.",
        f"The paper has 12 bytes: a weight and RMSProp's two values. This suite has {ours:.0f}: gradients stay "
        "allocated because micro-batches accumulate into them.",
        f"Naive-1 at the paper's (18, 208) would take {naive_bytes / GIB:.0f} GiB here: eager operators each save "
        "their inputs in fp32; a compiler that fuses them saves less. With micro-batches it hardly matters.",
        numbers["note"],
    ]
    title = "Table 1, AmoebaNet-D: the widest model that fits"
    return Table("table-1-amoebanet", title, headings, _rows("amoebanet", TABLE_BATCH, ours, report, row), notes)


def _rows(
    model: str,
    batch: int,
    ours: float,
    report: ReportProgress,
    row: Callable[[int, PipelineSettings, float, int], list[Value]],
) -> list[list[Value]]:
    """Returns the rows of all columns for the paper's bytes per parameter and for ours. ``row`` gets the column's
    number, its pipeline, the bytes per parameter and the limit."""
    numbers, cases = paper_numbers(f"table1.{model}"), columns(model, batch)
    rows: list[list[Value]] = []
    for bytes_each in (numbers["bytes_per_parameter"], ours):
        for at, (name, pipeline) in enumerate(cases):
            report(len(rows), 2 * len(cases), f"{model}, {name}, {bytes_each:g} bytes per parameter")
            rows.append([name, bytes_each, *row(at, pipeline, bytes_each, numbers["device_gib"] * GIB)])
    return rows


def columns(model: str, batch: int) -> list[tuple[str, PipelineSettings]]:
    """Returns the paper's columns: naive runs the whole batch without recompute; pipelines use micro-batches of 1."""
    numbers = paper_numbers(f"table1.{model}")
    naive = PipelineSettings(stages=1, micro_batches=1, remat="never")
    return [
        (name, naive if name.startswith("Naive") else PipelineSettings(stages=stages, micro_batches=batch))
        for name, stages in zip(numbers["columns"], numbers["K"], strict=True)
    ]


def sizes(costs: Costs, pipeline: PipelineSettings, bytes_each: float, limit: int, unit: int) -> list[Value]:
    """Returns parameters, their bytes and those of activations in ``unit``, the fullest device and the limit in GiB."""
    peaks = cell_peaks(costs, pipeline, bytes_each, limit)
    parameters = sum(cost.parameters for cost in costs)
    held_bytes = bytes_each * parameters
    return [parameters, held_bytes / unit, (sum(peaks) - held_bytes) / unit, max(peaks) / GIB, limit / GIB]


def largest(fitting: Callable[[int], bool]) -> int:
    """Returns the largest fitting number by bisection, 0 if none is; every smaller number must fit too."""
    beyond = 1
    while fitting(beyond):
        beyond *= 2
    candidates = range(beyond // 2 + 1, beyond)
    return beyond // 2 + bisect_left(candidates, True, key=lambda number: not fitting(number))


def fits(costs: Costs, pipeline: PipelineSettings, bytes_each: float, limit: int) -> bool:
    """Returns whether some partition into that many stages stays within the limit."""
    fewest = fewest_cells(_furthest_end(MemoryModel(costs, pipeline.micro_batches, bytes_each), pipeline, limit))
    return fewest is not None and fewest <= pipeline.stages


def cell_peaks(costs: Costs, pipeline: PipelineSettings, bytes_each: float, limit: int) -> list[int]:
    """Returns the peak bytes of each cell in the fastest partition that fits."""
    memory = MemoryModel(costs, pipeline.micro_batches, bytes_each)
    seconds, furthest_end = [cost.seconds for cost in costs], _furthest_end(memory, pipeline, limit)
    cells = cell_ranges(partition(seconds, pipeline.stages, furthest_end), len(costs))
    of_cells, actions = memory.in_partition(cells, CellPlacement(pipeline.stages)), _actions(pipeline)
    return [UNCOUNTED_BYTES + peak_bytes(actions, [cell], GLOO) for cell in of_cells]


def _furthest_end(memory: MemoryModel, pipeline: PipelineSettings, limit: int) -> list[int]:
    bound = CellBound(memory, peak_terms(_actions(pipeline), 0, GLOO), GLOO, pipeline.stages)
    return bound.furthest_end(limit - UNCOUNTED_BYTES)


def _actions(pipeline: PipelineSettings) -> list[Action]:
    return ScheduleConfig.from_settings(pipeline).actions(1, pipeline.micro_batches)[0]  # equal for all stages


@cache
def amoebanet_costs(layers: int, filters: int, rows: int) -> Costs:
    """Returns the estimated costs of AmoebaNet-D on micro-batches of ``rows`` images."""
    work = find_amoebanet(f"amoebanet_{layers}x{filters}", devices=1)
    assert work is not None
    return _estimated(work.with_settings(f"pipeline.micro_batches={TABLE_BATCH // rows}"), "TPUv2")


def _estimated(work: Experiment, device: str) -> Costs:
    return estimated_costs(work, Cluster(1, DEVICES[device].memory_bytes, "gpu", device=DEVICES[device])).costs
