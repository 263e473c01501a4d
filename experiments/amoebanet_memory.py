"""Table 1, AmoebaNet-D: the widest that fits at the paper's depths, by the plan's own rule of memory."""

from __future__ import annotations

from functools import cache

from experiments.cluster import GIB, Cluster
from experiments.image_workload import BATCH, SIZE, Classification, find_amoebanet
from experiments.memory_table import Column, columns, fit, fits, largest
from experiments.paper import printed
from experiments.planning import estimated_price
from experiments.table import Report, Table, Value, silent
from suite.pipeline.costs import LayerCost
from suite.pipeline.devices import DEVICES
from suite.pipeline.memory import bytes_per_parameter
from suite.settings import OptimizerSettings

STEP = 16
"""Widths are multiples of it, as all of the paper's are."""

GB = 10**9


def amoebanet_table(report: Report = silent) -> Table:
    """Returns the table, at the bytes a parameter that this suite keeps and at the paper's 12."""
    numbers = printed("table1.amoebanet")
    ours = bytes_per_parameter(OptimizerSettings(name="rmsprop"), replicas=1)
    rows: list[list[Value]] = []
    cases = columns("amoebanet", BATCH)
    for each in (numbers["bytes_per_parameter"], ours):
        for at, column in enumerate(cases):
            report(len(rows), 2 * len(cases), f"AmoebaNet-D, {column.name}, {each:g} bytes a parameter")
            rows.append(_row(at, column, each, numbers["device_gib"] * GIB))
    headings = (
        "devices", "bytes a parameter", "L", "largest D (computed)", "parameters (computed)",
        "parameters GB (computed)", "peak activations GB (computed)", "fullest device GiB (computed)", "limit GiB",
        "D (paper)", "ratio of D", "parameters (paper)", "parameters GB (paper)", "peak activations GB (paper)",
    )  # fmt: skip
    notes = [
        f"Mini-batch {BATCH} images of {SIZE} x {SIZE}, fp32; with a pipeline M = {BATCH}, the last micro-batch not "
        f"rebuilt. L is the paper's, D the largest multiple of {STEP} that fits.",
        "GB are sums over devices. Activations are all that does not stand for parameters: inputs kept of each "
        "micro-batch, skips among them, activations and gradients of one micro-batch, messages.",
        f"12 bytes are the paper's: a weight and RMSProp's two numbers. {ours:.0f} are what this suite keeps: "
        "gradients stand all the while because micro-batches add to them.",
        f"Naive-1 at the paper's (18, 208) would take {_naive_gib():.0f} GiB here: eager operators keep what they were "
        "given one by one, in fp32; a compiler that fuses them keeps less. With micro-batches it hardly matters.",
        numbers["note"],
    ]
    return Table("table-1-amoebanet", "Table 1, AmoebaNet-D: the widest model that fits", headings, rows, notes)


def _row(at: int, column: Column, each: float, limit: int) -> list[Value]:
    numbers = printed("table1.amoebanet")
    layers, paper = numbers["L"][at], numbers["D"][at]
    pipeline = column.pipeline
    rows = BATCH // pipeline.micro_batches
    most = STEP * largest(lambda units: fits(amoebanet_costs(layers, STEP * units, rows), pipeline, each, limit))
    costs = amoebanet_costs(layers, most, rows)
    peaks = fit(costs, pipeline, each, limit)
    parameters = sum(cost.parameters for cost in costs)
    standing = each * parameters
    return [
        column.name, each, layers, most, parameters, standing / GB, (sum(peaks) - standing) / GB, max(peaks) / GIB,
        limit / GIB, paper, most / paper, numbers["parameters"][at], numbers["parameter_gb"][at],
        numbers["activation_gb"][at],
    ]  # fmt: skip


def _naive_gib() -> float:
    """Returns what the paper's largest network without a pipeline needs here."""
    numbers, naive = printed("table1.amoebanet"), columns("amoebanet", BATCH)[0].pipeline
    costs = amoebanet_costs(numbers["L"][0], numbers["D"][0], BATCH)
    return max(fit(costs, naive, numbers["bytes_per_parameter"], 2**62)) / GIB


@cache
def amoebanet_costs(layers: int, filters: int, rows: int) -> tuple[LayerCost, ...]:
    """Returns the estimated costs of AmoebaNet-D on micro-batches of so many images."""
    work = find_amoebanet(f"amoebanet_{layers}x{filters}", devices=1)
    assert isinstance(work, Classification)
    one = work.with_pipeline(work.pipeline.model_copy(update={"micro_batches": BATCH // rows}))
    return estimated_price(one, Cluster(1, DEVICES["TPUv2"].memory, "gpu", device=DEVICES["TPUv2"])).costs
