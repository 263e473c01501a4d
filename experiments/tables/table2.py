"""Tables 2 and 3: real processes, real messages, layers that sleep.

Each stage is one layer that sleeps as long as its cell would compute, so K = 8 runs on two cores. The tables compare
measured times (the executor), simulated ones (``suite.pipeline.planning.simulate``), computed ones (the closed form
(M+K-1)(F+B) + (M-1)R of equal stages), and the paper's.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from experiments.base.cluster import Cluster
from experiments.base.workload import SingleThreadWorkload
from experiments.images.experiment import ImageExperiment
from experiments.images.runs import TABLE_BATCH, TABLE_SIZE, find_amoebanet
from experiments.language_model.runs import SEQUENCES as BATCH
from experiments.language_model.runs import language_model
from experiments.planning.problem import estimated_costs
from experiments.planning.request import plan_request
from experiments.report.paper import paper_numbers
from experiments.report.table import ReportProgress, Table, Value, relative_spread
from experiments.tables.sleeping import SquareError, SyntheticLayer
from models.shape import LanguageModelShape
from suite.pipeline.model.layers import meta_device
from suite.pipeline.planning.costs import LayerCost
from suite.pipeline.planning.devices import DEVICES, Machine
from suite.pipeline.planning.fit import Problem
from suite.pipeline.planning.plan import make_plan
from suite.pipeline.planning.sample import MicroBatch, Sample
from suite.pipeline.planning.simulate import CellCost, Link, simulate
from suite.pipeline.schedule.config import ScheduleConfig
from suite.settings import PipelineSettings

SLEEP_S = 0.040
"""Mean sleep of a forward, equal at every K and M, so that late wake-ups have the same weight."""

MESSAGE_BYTES = 1 << 16
"""Size of a message between stages where links cost nothing."""

StageSeconds = tuple[tuple[float, float], ...]
"""(forward, backward) of each stage and micro-batch."""

Speeds = dict[tuple[int, int], float]
"""Speeds by (K, M)."""


@dataclass(frozen=True)
class SleepingWork(SingleThreadWorkload):
    """A pipeline of sleeping layers, one per stage."""

    seconds: StageSeconds
    micro_batches: int
    message_bytes: int = MESSAGE_BYTES
    name: str = "sleeping"

    @property
    def pipeline(self) -> PipelineSettings:
        return PipelineSettings(stages=len(self.seconds), micro_batches=self.micro_batches)

    def build(self) -> tuple[list[nn.Module], nn.Module]:
        with meta_device():
            layers = [SyntheticLayer(forward, backward / 2, backward / 2) for forward, backward in self.seconds]
        return list[nn.Module](layers), SquareError()

    def sample(self) -> Sample:
        """A tensor as large as the message."""
        x = torch.ones(max(1, self.message_bytes // 4))
        micro_batch = MicroBatch((x,), (torch.zeros(1),))
        return Sample(micro_batch, micro_batch)


@dataclass(frozen=True)
class Measurement:
    """Measurements of a sleeping pipeline: seconds of its steps, and its stages' (F, R, B) measured alone."""

    seconds: tuple[float, ...]
    stage_costs: tuple[LayerCost, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        return relative_spread(self.seconds)


Measure = Callable[[SleepingWork], Measurement]


def simulated_step(
    costs: Sequence[LayerCost], micro_batches: int, message_bytes: int = 0, link: Link | None = None
) -> float:
    """Returns the simulated seconds of a step with these stage costs; without a link messages take no time."""
    stages = [
        CellCost(
            cost.forward_s,
            cost.recompute_s,
            cost.backward_s,
            activation_bytes=message_bytes,
            gradient_bytes=message_bytes,
        )
        for cost in costs
    ]
    return simulate(ScheduleConfig().actions(len(stages), micro_batches), stages, link or Link()).seconds


def closed_form(costs: Sequence[LayerCost], micro_batches: int) -> float:
    """Returns (M+K-1)(F+B) + (M-1)R of the mean stage, the lower bound of a fill-drain step with early recompute."""
    forward = statistics.fmean(cost.forward_s for cost in costs)
    recompute = statistics.fmean(cost.recompute_s for cost in costs)
    backward = statistics.fmean(cost.backward_s for cost in costs)
    return (micro_batches + len(costs) - 1) * (forward + backward) + (micro_batches - 1) * recompute


def table_2(measure: Measure, report: ReportProgress) -> Table:
    """Returns Table 2's Transformer-48: speed over K and M, relative to K = 2, M = 1."""
    numbers = paper_numbers("table2.transformer")
    rows, measured = _speeds(numbers["layers"], "TPUv3", _printed_speeds(numbers), measure, None, report)
    notes = [
        f"K = 8 over K = 2 at M = 32: measured {measured[8, 32] / measured[2, 32]:.3f}, closed form 3.514, 3.517 where "
        "the last micro-batch is recomputed too, the paper's table 3.50.",
        *COMMON_NOTES,
        numbers["note"],
    ]
    return Table("table-2", "Table 2, Transformer-48: speed over K = 2, M = 1", HEADINGS, rows, notes)


def table_3(measure: Measure, report: ReportProgress) -> Table:
    """Returns Table 3's Transformer-24 on P100s without NVLink: speed over K, relative to K = 2, at M = 32."""
    numbers = paper_numbers("table3.transformer")
    printed = {(stages, numbers["M"]): speed for stages, speed in zip(numbers["K"], numbers["speed"], strict=True)}
    rows, _ = _speeds(numbers["layers"], "P100", printed, measure, DEVICES["P100"].messages, report)
    notes = [
        *COMMON_NOTES,
        "Measured: messages of the real size times the factor of the sleeps, over gloo. "
        f"Simulated: the same bytes at a P100's {DEVICES['P100'].link / 1e9:.0f} GB/s through the host.",
        numbers["note"],
    ]
    title = "Table 3, Transformer-24 without NVLink: speed over K = 2, M = 32"
    return Table("table-3", title, HEADINGS, rows, notes)


COMMON_NOTES = (
    "Rows 'equal' divide the model evenly, the head included. Rows 'as cut' have the costs of the planned cells, "
    "embedding and head included: whole layers do not divide evenly, and the most expensive cell decides.",
    "Measured: the executor with sleeping stages, one process each, calibrated to the estimated layer costs. Each "
    f"row is slowed down so that a mean forward sleeps {SLEEP_S * 1e3:.0f} ms; the speeds are corrected for that.",
)

HEADINGS = (
    "K", "M", "cells", "slowed down", "step s (measured)", "spread", "speed (measured)", "speed (simulated)",
    "speed, closed form (computed)", "speed (paper)", "ours / paper",
)  # fmt: skip


def _speeds(
    layers: int, device: str, printed: Speeds, measure: Measure, link: Link | None, report: ReportProgress
) -> tuple[list[list[Value]], Speeds]:
    """Measures each printed case with equal cells, and those with the most micro-batches with planned ones; messages
    have their real size where the ``link`` takes time. Returns the rows, with speeds over the first, and the measured
    speeds of equal cells."""
    rows: list[list[Value]] = []
    first: list[float] = []
    of_equal: Speeds = {}
    most = max(micro_batches for _, micro_batches in printed)
    cases = [("equal", *case) for case in printed] + [("as cut", *case) for case in printed if case[1] == most]
    for cells, stages, micro_batches in cases:
        report(len(rows), len(cases), f"K = {stages}, M = {micro_batches}, cells {cells}")
        seconds, message, slowed = cell_seconds(layers, device, stages, micro_batches, cells == "as cut")
        measured = measure(SleepingWork(seconds, micro_batches, MESSAGE_BYTES if link is None else message))
        costs = measured.stage_costs
        simulated_s = simulated_step(costs, micro_batches, message, link)
        steps = [each / slowed for each in (measured.median, simulated_s, closed_form(costs, micro_batches))]
        first = first or steps
        speeds = [base / own for base, own in zip(first, steps, strict=True)]
        paper = printed[stages, micro_batches]
        shape = stages, micro_batches, cells, slowed, measured.median, measured.spread
        rows.append([*shape, *speeds, paper, speeds[0] / paper])
        if cells == "equal":
            of_equal[stages, micro_batches] = speeds[0]
    return rows, of_equal


def _printed_speeds(numbers: dict[str, Any]) -> Speeds:
    """Returns the paper's speeds of Table 2, M by M."""
    cases = [(stages, micro_batches) for micro_batches in numbers["M"] for stages in numbers["K"]]
    return dict(zip(cases, (speed for row in numbers["speed"] for speed in row), strict=True))


def slowed_down(costs: Sequence[CellCost], part: float) -> tuple[StageSeconds, float]:
    """Returns the seconds of the stages for a micro-batch ``part`` times as large, and the factor that slows them down:
    with it the mean forward of a stage takes ``SLEEP_S``."""
    slowed = SLEEP_S / (sum(cost.forward_s for cost in costs) * part / len(costs))
    factor = part * slowed
    return tuple((cost.forward_s * factor, cost.backward_s * factor) for cost in costs), slowed


def cell_seconds(
    layers: int, device: str, stages: int, micro_batches: int, cut: bool
) -> tuple[StageSeconds, int, float]:
    """Returns the seconds of each stage of a Transformer, the bytes of a message, and the factor that slows both down.

    The mini-batch is the same for every K and M: a micro-batch is 1/M of it, a stage about 1/K of the model.
    """
    cluster = Cluster(stages, 2**62, "gpu", device=replace(DEVICES[device], memory_bytes=2**62))
    work = language_model(LanguageModelShape(layers), PipelineSettings(stages=stages, micro_batches=BATCH))
    costs = [cell.cost for cell in plan_request(work, cluster, estimated_costs).plan.cells]
    part = BATCH / micro_batches  # of the mini-batch, in the micro-batches that were estimated
    seconds, slowed = slowed_down(costs, part)
    message = int(max(cost.activation_bytes for cost in costs) * part * slowed)
    if not cut:
        forward, backward = (sum(getattr(cost, name) for cost in costs) for name in ("forward_s", "backward_s"))
        factor = part * slowed
        seconds = ((forward / stages * factor, backward / stages * factor),) * stages
    return seconds, message, slowed


MeasureCosts = Callable[[ImageExperiment], Sequence[LayerCost]]
"""Returns the costs of each layer of a run, measured on this machine."""


def split_layers(
    costs: Sequence[LayerCost], stages: int, micro_batches: int, base: int
) -> tuple[tuple[int, ...], StageSeconds, float]:
    """Partitions layers into stages by the planner; returns the layers of each, and what ``slowed_down`` does.

    ``costs`` are of one of ``base`` micro-batches; the time of a micro-batch is proportional to its size.
    """
    pipeline = PipelineSettings(stages=stages, micro_batches=micro_batches)
    # the emulation sleeps a forward's time for a recompute, so the plan must balance the same costs
    slept = [replace(cost, recompute_s=cost.forward_s) for cost in costs]
    plan = make_plan(Problem(slept, pipeline, 0.0, Machine(memory_limit_bytes=2**62)))
    return plan.layers_per_cell, *slowed_down([cell.cost for cell in plan.cells], base / micro_batches)


def heaviest_over_mean(seconds: StageSeconds) -> float:
    """Returns F + B + R of the most expensive cell over the mean cell's."""
    weights = [2 * forward + backward for forward, backward in seconds]
    return max(weights) * len(weights) / sum(weights)


def amoebanet_speeds(measure: Measure, costs: MeasureCosts, report: ReportProgress) -> Table:
    """Returns Table 2's AmoebaNet-D(18, 256), whose cells are uneven: speed over K and M, relative to K = 2, M = 1."""
    numbers = paper_numbers("table2.amoebanet")
    base = max(numbers["M"])
    work = find_amoebanet(f"amoebanet_{numbers['layers']}x{numbers['filters']}", devices=1)
    assert work is not None
    layers = costs(work.with_pipeline(PipelineSettings(micro_batches=base)))
    rows: list[list[Value]] = []
    first: tuple[float, float] | None = None
    printed = _printed_speeds(numbers)
    for (stages, micro_batches), paper in printed.items():
        report(len(rows), len(printed), f"AmoebaNet-D, K = {stages}, M = {micro_batches}")
        cells, seconds, slowed = split_layers(layers, stages, micro_batches, base)
        measured = measure(SleepingWork(seconds, micro_batches))
        step, simulated = measured.median / slowed, simulated_step(measured.stage_costs, micro_batches) / slowed
        first = first or (step, simulated)
        speed = first[0] / step
        shape = stages, micro_batches, str(cells), heaviest_over_mean(seconds), measured.median, measured.spread
        rows.append([*shape, speed, first[1] / simulated, paper, speed / paper])
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
