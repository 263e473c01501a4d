"""Table 1, AmoebaNet-D: the widest models that fit at the paper's depths, computed by the planner's memory model."""

from __future__ import annotations

from functools import cache

from experiments.base.cluster import Cluster
from experiments.images.runs import TABLE_BATCH, TABLE_SIZE, find_amoebanet
from experiments.planning.planner import estimated_costs
from experiments.report.paper import paper_numbers
from experiments.report.table import ReportProgress, Table, Value, silent
from experiments.tables.table1_transformer import Column, cell_peaks, columns, each_row, fits, largest, sizes
from suite.pipeline.planning.costs import LayerCost
from suite.pipeline.planning.devices import DEVICES, GIB
from suite.pipeline.planning.memory import bytes_per_parameter
from suite.settings import OptimizerSettings

STEP = 16
"""Widths are multiples of 16, as in the paper."""

GB = 10**9


def amoebanet_table(report: ReportProgress = silent) -> Table:
    """Returns the table, for this suite's bytes per parameter and for the paper's 12."""
    numbers = paper_numbers("table1.amoebanet")
    ours = bytes_per_parameter(OptimizerSettings(name="rmsprop"), replicas=1)
    rows = each_row("amoebanet", TABLE_BATCH, ours, report, _row)
    headings = (
        "devices", "bytes per parameter", "L", "largest D (computed)", "parameters (computed)",
        "parameters GB (computed)", "peak activations GB (computed)", "fullest device GiB (computed)", "limit GiB",
        "D (paper)", "ratio of D", "parameters (paper)", "parameters GB (paper)", "peak activations GB (paper)",
    )  # fmt: skip
    notes = [
        f"Mini-batch {TABLE_BATCH} images of {TABLE_SIZE} x {TABLE_SIZE}, fp32; with a pipeline M = {TABLE_BATCH}, "
        f"the last micro-batch not recomputed. L is the paper's, D the largest multiple of {STEP} that fits.",
        "GB are sums over devices. Activations are all memory that is not for parameters: the saved inputs of each "
        "micro-batch, skips included, activations and gradients of one micro-batch, messages.",
        f"The paper has 12 bytes: a weight and RMSProp's two values. This suite has {ours:.0f}: gradients stay "
        "allocated because micro-batches accumulate into them.",
        f"Naive-1 at the paper's (18, 208) would take {_naive_gib():.0f} GiB here: eager operators each save their "
        "inputs in fp32; a compiler that fuses them saves less. With micro-batches it hardly matters.",
        numbers["note"],
    ]
    return Table("table-1-amoebanet", "Table 1, AmoebaNet-D: the widest model that fits", headings, rows, notes)


def _row(at: int, column: Column, bytes_each: float, limit: int) -> list[Value]:
    numbers, pipeline = paper_numbers("table1.amoebanet"), column.pipeline
    layers, printed = numbers["L"][at], numbers["D"][at]
    rows = TABLE_BATCH // pipeline.micro_batches
    most = STEP * largest(lambda units: fits(amoebanet_costs(layers, STEP * units, rows), pipeline, bytes_each, limit))
    return [
        column.name, bytes_each, layers, most,
        *sizes(amoebanet_costs(layers, most, rows), pipeline, bytes_each, limit, GB), printed, most / printed,
        numbers["parameters"][at], numbers["parameter_gb"][at], numbers["activation_gb"][at],
    ]  # fmt: skip


def _naive_gib() -> float:
    """Returns the GiB that the paper's largest network without a pipeline needs here."""
    numbers, naive = paper_numbers("table1.amoebanet"), columns("amoebanet", TABLE_BATCH)[0].pipeline
    costs = amoebanet_costs(numbers["L"][0], numbers["D"][0], TABLE_BATCH)
    return max(cell_peaks(costs, naive, numbers["bytes_per_parameter"], 2**62)) / GIB


@cache
def amoebanet_costs(layers: int, filters: int, rows: int) -> tuple[LayerCost, ...]:
    """Returns the estimated costs of AmoebaNet-D on micro-batches of ``rows`` images."""
    work = find_amoebanet(f"amoebanet_{layers}x{filters}", devices=1)
    assert work is not None
    work = work.with_pipeline(work.pipeline.model_copy(update={"micro_batches": TABLE_BATCH // rows}))
    return estimated_costs(work, Cluster(1, DEVICES["TPUv2"].memory_bytes, "gpu", device=DEVICES["TPUv2"])).costs
