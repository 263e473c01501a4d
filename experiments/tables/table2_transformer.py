"""Tables 2 and 3 of Transformers: real processes, real messages, layers that sleep.

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
from experiments.language_model.runs import SEQUENCES as BATCH
from experiments.language_model.runs import language_model
from experiments.planning.planner import estimated_costs, plan_workload
from experiments.report.paper import paper_numbers
from experiments.report.table import ReportProgress, Table, Value, relative_spread, silent
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
    at_32 = {row["K"]: row["measured"] for row in rows if row["M"] == 32 and row["cells"] == "equal"}
    notes = [
        f"K = 8 over K = 2 at M = 32: measured {at_32[8] / at_32[2]:.3f}, closed form 3.514, 3.517 where the "
        "last micro-batch is recomputed too, the paper's table 3.50.",
        *_common_notes(),
        numbers["note"],
    ]
    return _speed_table("table-2", "Table 2, Transformer-48: speed over K = 2, M = 1", rows, notes)


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
    return _speed_table("table-3", "Table 3, Transformer-24 without NVLink: speed over K = 2, M = 32", rows, notes)


def _common_notes() -> list[str]:
    return [
        "Rows 'equal' divide the model evenly, the head included. Rows 'as cut' have the costs of the planned cells, "
        "embedding and head included: whole layers do not divide evenly, and the most expensive cell decides.",
        "Measured: the executor with sleeping stages, one process each, calibrated to the estimated layer costs. Each "
        f"row is slowed down so that a mean forward sleeps {SLEEP_S * 1e3:.0f} ms; the speeds are corrected for that.",
    ]


def _speed_table(name: str, title: str, rows: list[dict[str, Any]], notes: list[str]) -> Table:
    headings = (
        "K", "M", "cells", "slowed down", "step s (measured)", "spread", "speed (measured)", "speed (simulated)",
        "speed, closed form (computed)", "speed (paper)", "ours / paper",
    )  # fmt: skip
    columns = ("K", "M", "cells", "slowed", "step", "spread", "measured", "simulated", "closed", "paper")
    values: list[list[Value]] = [[*(row[column] for column in columns), row["measured"] / row["paper"]] for row in rows]
    return Table(name, title, headings, values, notes)


def _speeds(
    layers: int, device: str, cases: Sequence[tuple[int, int]], paper: dict[tuple[int, int], float], measure: Measure,
    real_links: bool, report: ReportProgress,
) -> list[dict[str, Any]]:  # fmt: skip
    """Measures each case with equal and with planned cells; speeds are relative to the first case."""
    rows: list[dict[str, Any]] = []
    most = max(micro_batches for _, micro_batches in cases)
    total = len(cases) + sum(micro_batches == most for _, micro_batches in cases)
    for cut in (False, True):
        for stages, micro_batches in cases:
            if cut and micro_batches != most:
                continue
            report(len(rows), total, f"K = {stages}, M = {micro_batches}, cells {'as cut' if cut else 'equal'}")
            seconds, message, slowed = cell_seconds(layers, device, stages, micro_batches, cut)
            work = SleepingWork(seconds, micro_batches, message if real_links else MESSAGE_BYTES)
            measured = measure(work)
            rows.append(
                {
                    "K": stages, "M": micro_batches, "cells": "as cut" if cut else "equal",
                    "slowed": slowed, "step": measured.median, "spread": measured.spread,
                    "simulated_s": simulated_step(
                        measured.stage_costs, micro_batches, message, DEVICES[device].messages if real_links else None
                    ),
                    "closed_s": closed_form(measured.stage_costs, micro_batches), "paper": paper[stages, micro_batches],
                }
            )  # fmt: skip
    for row in rows:
        for name, column in (("measured", "step"), ("simulated", "simulated_s"), ("closed", "closed_s")):
            row[name] = (rows[0][column] / rows[0]["slowed"]) / (row[column] / row["slowed"])
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
