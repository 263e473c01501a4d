"""Tables 2 and 3 of Transformers: real processes, real messages, layers that sleep.

Each stage is one layer that sleeps as long as its cell would compute, so K = 8 runs on two cores. The tables compare
measured times (the executor), simulated ones (``suite.pipeline.planning.simulate``), computed ones (the closed form
(M+K-1)(F+B) + (M-1)R of equal stages), and the paper's.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import nn

from experiments.base.cluster import Cluster
from experiments.base.workload import SingleThreadWorkload
from experiments.language_model.runs import SEQUENCES as BATCH
from experiments.language_model.runs import language_model
from experiments.planning.planner import estimated_costs, plan_workload
from experiments.report.paper import paper_numbers
from experiments.report.table import ReportProgress, Table, relative_spread, silent
from experiments.tables.sleeping import SquareError, SyntheticLayer
from models.language_model import LanguageModelShape
from suite.pipeline.planning.costs import LayerCost
from suite.pipeline.planning.devices import DEVICES
from suite.pipeline.planning.profile import MicroBatch, Sample
from suite.pipeline.planning.simulate import CellCost, Link, simulate
from suite.pipeline.schedule.config import ScheduleConfig
from suite.settings import PipelineSettings

SLEEP_S = 0.040
"""Mean sleep of a forward, equal at every K and M, so that late wake-ups have the same weight."""

MESSAGE_BYTES = 1 << 16
"""Size of a message between stages where links cost nothing."""


@dataclass(frozen=True)
class SleepingWork(SingleThreadWorkload):
    """A pipeline of sleeping layers, one per stage."""

    seconds: tuple[tuple[float, float], ...]
    """(forward, backward) of each stage and micro-batch."""
    micro_batches: int
    message_bytes: int = MESSAGE_BYTES
    name: str = "sleeping"

    @property
    def pipeline(self) -> PipelineSettings:
        return PipelineSettings(stages=len(self.seconds), micro_batches=self.micro_batches)

    def build(self) -> tuple[list[nn.Module], nn.Module]:
        with torch.device("meta"):
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
    forward, recompute, backward = (
        statistics.fmean(seconds)
        for seconds in zip(*((cost.forward_s, cost.recompute_s, cost.backward_s) for cost in costs), strict=True)
    )
    return (micro_batches + len(costs) - 1) * (forward + backward) + (micro_batches - 1) * recompute


def table_2(measure: Measure, report: ReportProgress = silent) -> Table:
    """Returns Table 2's Transformer-48: speed over K and M, relative to K = 2, M = 1."""
    numbers = paper_numbers("table2.transformer")
    cases = [(stages, micro_batches) for micro_batches in numbers["M"] for stages in numbers["K"]]
    paper = dict(zip(cases, (speed for row in numbers["speed"] for speed in row), strict=True))
    rows = _speeds(numbers["layers"], "TPUv3", cases, paper, measure, False, report)
    at_32 = {row.stages: row.measured for row in rows if row.micro_batches == 32 and row.cells == "equal"}
    notes = [
        f"K = 8 over K = 2 at M = 32: measured {at_32[8] / at_32[2]:.3f}, closed form 3.514, 3.517 where the "
        "last micro-batch is recomputed too, the paper's table 3.50.",
        *_common_notes(),
        numbers["note"],
    ]
    return Table("table-2", "Table 2, Transformer-48: speed over K = 2, M = 1", HEADINGS, rows, notes)


def table_3(measure: Measure, report: ReportProgress = silent) -> Table:
    """Returns Table 3's Transformer-24 on P100s without NVLink: speed over K, relative to K = 2, at M = 32."""
    numbers = paper_numbers("table3.transformer")
    cases = [(stages, numbers["M"]) for stages in numbers["K"]]
    paper = dict(zip(cases, numbers["speed"], strict=True))
    rows = _speeds(numbers["layers"], "P100", cases, paper, measure, True, report)
    notes = [
        *_common_notes(),
        "Measured: messages of the real size times the factor of the sleeps, over gloo. "
        f"Simulated: the same bytes at a P100's {DEVICES['P100'].link / 1e9:.0f} GB/s through the host.",
        numbers["note"],
    ]
    title = "Table 3, Transformer-24 without NVLink: speed over K = 2, M = 32"
    return Table("table-3", title, HEADINGS, rows, notes)


def _common_notes() -> list[str]:
    return [
        "Rows 'equal' divide the model evenly, the head included. Rows 'as cut' have the costs of the planned cells, "
        "embedding and head included: whole layers do not divide evenly, and the most expensive cell decides.",
        "Measured: the executor with sleeping stages, one process each, calibrated to the estimated layer costs. Each "
        f"row is slowed down so that a mean forward sleeps {SLEEP_S * 1e3:.0f} ms; the speeds are corrected for that.",
    ]


HEADINGS = (
    "K", "M", "cells", "slowed down", "step s (measured)", "spread", "speed (measured)", "speed (simulated)",
    "speed, closed form (computed)", "speed (paper)", "ours / paper",
)  # fmt: skip


class SpeedRow(NamedTuple):
    """A row of Table 2 or 3; speeds are over the first row."""

    stages: int
    micro_batches: int
    cells: str
    slowed: float
    step_s: float
    spread: float
    measured: float
    simulated: float
    closed_form: float
    paper: float
    over_paper: float


def _speeds(
    layers: int,
    device: str,
    cases: Sequence[tuple[int, int]],
    paper: dict[tuple[int, int], float],
    measure: Measure,
    real_links: bool,
    report: ReportProgress,
) -> list[SpeedRow]:
    """Measures each case with equal cells, and those with the most micro-batches with planned ones."""
    rows: list[SpeedRow] = []
    first: list[float] = []
    most = max(micro_batches for _, micro_batches in cases)
    all_cases = [("equal", *case) for case in cases] + [("as cut", *case) for case in cases if case[1] == most]
    for cells, stages, micro_batches in all_cases:
        report(len(rows), len(all_cases), f"K = {stages}, M = {micro_batches}, cells {cells}")
        seconds, message, slowed = cell_seconds(layers, device, stages, micro_batches, cells == "as cut")
        measured = measure(SleepingWork(seconds, micro_batches, message if real_links else MESSAGE_BYTES))
        costs, link = measured.stage_costs, DEVICES[device].messages if real_links else None
        simulated_s = simulated_step(costs, micro_batches, message, link)
        steps = [each / slowed for each in (measured.median, simulated_s, closed_form(costs, micro_batches))]
        first = first or steps
        speeds = [base / own for base, own in zip(first, steps, strict=True)]
        printed = paper[stages, micro_batches]
        shape = stages, micro_batches, cells, slowed, measured.median, measured.spread
        rows.append(SpeedRow(*shape, speeds[0], speeds[1], speeds[2], printed, speeds[0] / printed))
    return rows


def cell_seconds(
    layers: int, device: str, stages: int, micro_batches: int, cut: bool
) -> tuple[tuple[tuple[float, float], ...], int, float]:
    """Returns (forward, backward) of each stage, the bytes of a message, and the factor that slows both down.

    The mini-batch is the same for every K and M: a micro-batch is 1/M of it, a stage about 1/K of the model. With the
    factor, the mean forward of a stage takes ``SLEEP_S``.
    """
    shape = LanguageModelShape(layers)
    cluster = Cluster(stages, DEVICES[device].memory_bytes, "gpu", device=replace(DEVICES[device], memory_bytes=2**62))
    work = language_model(shape, PipelineSettings(stages=stages, micro_batches=BATCH))
    planned = plan_workload(work, replace(cluster, bytes_per_device=2**62), estimated_costs)
    costs = [stage.cost for stage in planned.plan.cells]
    forward, backward = (sum(getattr(cost, name) for cost in costs) for name in ("forward_s", "backward_s"))
    part = BATCH / micro_batches  # of the mini-batch, in the micro-batches that were estimated
    slowed = SLEEP_S / (forward * part / stages)
    message = int(max(cost.activation_bytes for cost in costs) * part * slowed)
    factor = part * slowed
    if cut:
        return tuple((cost.forward_s * factor, cost.backward_s * factor) for cost in costs), message, slowed
    return ((forward / stages * factor, backward / stages * factor),) * stages, message, slowed
