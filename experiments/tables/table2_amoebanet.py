"""Table 2, AmoebaNet-D(18, 256): uneven cells, partitioned by the planner and by count, emulated and simulated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from experiments.base.cluster import Cluster
from experiments.images.workload import BATCH, SIZE, Classification, find_amoebanet
from experiments.report.paper import printed
from experiments.report.table import Report, Table, Value, silent
from experiments.tables.table2_transformer import MESSAGE_BYTES, SLEEP_S, Measure, SleepingWork, simulated_step
from suite.pipeline.planning.costs import LayerCost
from suite.pipeline.planning.plan import Machine, make_plan
from suite.settings import PipelineSettings

Costs = Callable[[Classification], Sequence[LayerCost]]
"""Returns the costs of each layer of a workload, measured on this machine."""

BOUNDLESS = Cluster(1, 2**62, "gpu")


@dataclass(frozen=True)
class Cut:
    """Cells of AmoebaNet, slowed down for emulation by sleeping: seconds of each stage, and the slow-down factor."""

    cells: tuple[int, ...]
    seconds: tuple[tuple[float, float], ...]
    slowed: float

    @property
    def heaviest(self) -> float:
        """F + B + R of the most expensive cell over the mean cell's."""
        weights = [2 * forward + backward for forward, backward in self.seconds]
        return max(weights) * len(weights) / sum(weights)


def split_layers(costs: Sequence[LayerCost], stages: int, micro_batches: int, base: int, even: bool) -> Cut:
    """Partitions layers into stages: by the planner, or with ``even`` into equal numbers of layers.

    ``costs`` are of one of ``base`` micro-batches; the time of a micro-batch is proportional to its size.
    """
    pipeline = PipelineSettings(stages=stages, micro_batches=micro_batches)
    if even:
        least, more = divmod(len(costs), stages)
        pipeline = pipeline.model_copy(update={"layers_per_cell": (*(least + 1,) * more, *(least,) * (stages - more))})
    # the emulation sleeps a forward's time for a recompute, so the plan must balance the same costs
    slept = [replace(cost, recompute_s=cost.forward_s) for cost in costs]
    plan = make_plan(slept, len(slept), pipeline, 0.0, Machine(BOUNDLESS.bytes_per_device))
    part = base / micro_batches
    forward = sum(stage.cost.forward_s for stage in plan.cells)
    slowed = SLEEP_S / (forward * part / stages)
    factor = part * slowed
    seconds = tuple((stage.cost.forward_s * factor, stage.cost.backward_s * factor) for stage in plan.cells)
    return Cut(plan.layers_per_cell, seconds, slowed)


def measured_costs(costs: Costs) -> tuple[Sequence[LayerCost], int]:
    """Returns the layers' costs at the largest M of the table, and that M."""
    numbers = printed("table2.amoebanet")
    base = max(numbers["M"])
    work = find_amoebanet(f"amoebanet_{numbers['layers']}x{numbers['filters']}", devices=1)
    assert isinstance(work, Classification)
    return costs(work.with_pipeline(PipelineSettings(micro_batches=base))), base


def amoebanet_speeds(measure: Measure, costs: Costs, report: Report = silent) -> Table:
    """Returns Table 2's AmoebaNet: speed over K and M, relative to K = 2, M = 1."""
    numbers = printed("table2.amoebanet")
    layers, base = measured_costs(costs)
    rows: list[list[Value]] = []
    first: tuple[float, float] | None = None
    for m, paper in zip(numbers["M"], numbers["speed"], strict=True):
        for stages, printed_speed in zip(numbers["K"], paper, strict=True):
            report(len(rows), len(numbers["M"]) * len(numbers["K"]), f"AmoebaNet-D, K = {stages}, M = {m}")
            one = split_layers(layers, stages, m, base, even=False)
            found = measure(SleepingWork(one.seconds, m, MESSAGE_BYTES // 16))
            step, simulated = found.median / one.slowed, simulated_step(found.alone, m) / one.slowed
            first = first or (step, simulated)
            speed = first[0] / step
            rows.append(
                [stages, m, str(one.cells), one.heaviest, found.median, found.spread, speed, first[1] / simulated,
                 printed_speed, speed / printed_speed]
            )  # fmt: skip
    headings = (
        "K", "M", "cells", "heaviest / mean cell", "step s (measured)", "spread", "speed (measured)",
        "speed (simulated)", "speed (paper)", "ours / paper",
    )  # fmt: skip
    notes = [
        f"Layer costs are measured: the real cells of AmoebaNet-D({numbers['layers']}, {numbers['filters']}), images "
        f"of {SIZE} x {SIZE}, micro-batches of {BATCH // base}, one thread of this machine. The plan cuts them, as "
        "uneven as they come out.",
        "Measured: the executor over sleeping stages, one process each, calibrated to these costs, each row slowed "
        f"down until a forward sleeps {SLEEP_S * 1e3:.0f} ms in the mean; the speeds have that taken out.",
        "From K = 2 to K = 8 at M = 32 the paper's speed grows 2.88 times; that of even cells would 3.517 times.",
    ]
    return Table("table-2-amoebanet", "Table 2, AmoebaNet-D(18, 256): speed over K = 2, M = 1", headings, rows, notes)


def partition_table(measure: Measure, costs: Costs, report: Report = silent) -> Table:
    """Returns what the plan's cut is worth beside as many layers for every stage, at M = 32."""
    numbers = printed("table2.amoebanet")
    layers, base = measured_costs(costs)
    rows: list[list[Value]] = []
    for stages in numbers["K"]:
        steps: list[float] = []
        for even in (True, False):
            report(len(rows), 2 * len(numbers["K"]), f"K = {stages}, {'even' if even else 'by the plan'}")
            one = split_layers(layers, stages, base, base, even)
            found = measure(SleepingWork(one.seconds, base, MESSAGE_BYTES // 16))
            # all of a K are cut from the same layers, so one factor slows both down
            steps.append(found.median)
            simulated = simulated_step(found.alone, base)
            what = "as many layers each" if even else "by the plan"
            rows.append(
                [
                    stages,
                    what,
                    str(one.cells),
                    one.heaviest,
                    simulated,
                    found.median,
                    found.spread,
                    steps[0] / steps[-1],
                ]
            )
    headings = (
        "K", "cut", "cells", "heaviest / mean cell", "step s (simulated)", "step s (measured)", "spread",
        "faster (measured)",
    )  # fmt: skip
    notes = [
        f"AmoebaNet-D({numbers['layers']}, {numbers['filters']}), M = {base}; layer costs measured, stages asleep, "
        "as in Table 2.",
    ]
    return Table("partition", "The plan's cut of AmoebaNet against an even one", headings, rows, notes)
