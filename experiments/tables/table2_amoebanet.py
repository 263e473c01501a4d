"""Table 2, AmoebaNet-D(18, 256): uneven cells, partitioned by the planner, emulated and simulated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from experiments.images.experiment import ImageExperiment
from experiments.images.runs import TABLE_BATCH, TABLE_SIZE, find_amoebanet
from experiments.report.paper import paper_numbers
from experiments.report.table import ReportProgress, Table, Value, silent
from experiments.tables.table2_transformer import SLEEP_S, Measure, SleepingWork, simulated_step
from suite.pipeline.planning.costs import LayerCost
from suite.pipeline.planning.devices import Machine
from suite.pipeline.planning.plan import make_plan
from suite.settings import PipelineSettings

MeasureCosts = Callable[[ImageExperiment], Sequence[LayerCost]]
"""Returns the costs of each layer of a run, measured on this machine."""


@dataclass(frozen=True)
class EmulatedCells:
    """Cells of AmoebaNet, slowed down for emulation by sleeping: seconds of each stage, and the slow-down factor."""

    cells: tuple[int, ...]
    seconds: tuple[tuple[float, float], ...]
    slowdown: float

    @property
    def heaviest_over_mean(self) -> float:
        """F + B + R of the most expensive cell over the mean cell's."""
        weights = [2 * forward + backward for forward, backward in self.seconds]
        return max(weights) * len(weights) / sum(weights)


def split_layers(costs: Sequence[LayerCost], stages: int, micro_batches: int, base: int) -> EmulatedCells:
    """Partitions layers into stages by the planner.

    ``costs`` are of one of ``base`` micro-batches; the time of a micro-batch is proportional to its size.
    """
    pipeline = PipelineSettings(stages=stages, micro_batches=micro_batches)
    # the emulation sleeps a forward's time for a recompute, so the plan must balance the same costs
    slept = [replace(cost, recompute_s=cost.forward_s) for cost in costs]
    plan = make_plan(slept, pipeline, 0.0, Machine(memory_limit_bytes=2**62))
    part = base / micro_batches
    forward_s = sum(cell.cost.forward_s for cell in plan.cells)
    slowdown = SLEEP_S / (forward_s * part / stages)
    factor = part * slowdown
    seconds = tuple((cell.cost.forward_s * factor, cell.cost.backward_s * factor) for cell in plan.cells)
    return EmulatedCells(plan.layers_per_cell, seconds, slowdown)


def amoebanet_speeds(measure: Measure, costs: MeasureCosts, report: ReportProgress = silent) -> Table:
    """Returns Table 2's AmoebaNet: speed over K and M, relative to K = 2, M = 1."""
    numbers = paper_numbers("table2.amoebanet")
    base = max(numbers["M"])
    work = find_amoebanet(f"amoebanet_{numbers['layers']}x{numbers['filters']}", devices=1)
    assert work is not None
    layers = costs(work.with_pipeline(PipelineSettings(micro_batches=base)))
    rows: list[list[Value]] = []
    first: tuple[float, float] | None = None
    for m, paper in zip(numbers["M"], numbers["speed"], strict=True):
        for stages, printed_speed in zip(numbers["K"], paper, strict=True):
            report(len(rows), len(numbers["M"]) * len(numbers["K"]), f"AmoebaNet-D, K = {stages}, M = {m}")
            split = split_layers(layers, stages, m, base)
            measured = measure(SleepingWork(split.seconds, m))
            step, simulated = measured.median / split.slowdown, simulated_step(measured.stage_costs, m) / split.slowdown
            first = first or (step, simulated)
            speed = first[0] / step
            rows.append(
                [
                    stages, m, str(split.cells), split.heaviest_over_mean, measured.median, measured.spread, speed,
                    first[1] / simulated, printed_speed, speed / printed_speed,
                ]
            )  # fmt: skip
    headings = (
        "K", "M", "cells", "heaviest / mean cell", "step s (measured)", "spread", "speed (measured)",
        "speed (simulated)", "speed (paper)", "ours / paper",
    )  # fmt: skip
    notes = [
        f"Layer costs are measured: the real cells of AmoebaNet-D({numbers['layers']}, {numbers['filters']}), images "
        f"of {TABLE_SIZE} x {TABLE_SIZE}, micro-batches of {TABLE_BATCH // base}, one thread of this machine. The plan "
        "partitions them; the cells are uneven.",
        "Measured: the executor with sleeping stages, one process each, calibrated to these costs. Each row is slowed "
        f"down so that a mean forward sleeps {SLEEP_S * 1e3:.0f} ms; the speeds are corrected for that.",
        "From K = 2 to K = 8 at M = 32 the paper's speed grows 2.88 times; with even cells it would grow 3.517 times.",
    ]
    return Table("table-2-amoebanet", "Table 2, AmoebaNet-D(18, 256): speed over K = 2, M = 1", headings, rows, notes)
