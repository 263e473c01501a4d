"""Tables 2 and 3 and the efficiency of the executor: real processes, real messages, layers that sleep their time.

Each stage is one sleeping layer that takes the time its cell would take, so K = 8 runs on two cores. Three numbers
stand side by side: measured (the executor), simulated (``suite.pipeline.simulate``) and computed (the closed form
(M+K-1)(F+B) + (M-1)R of equal stages), and the paper's where it printed one.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from experiments.cluster import Cluster
from experiments.language import BATCH, LanguageModel
from experiments.paper import printed
from experiments.planning import estimated_price, make
from experiments.table import Report, Table, Value, silent
from models.language_model import LanguageModelShape
from models.sleeping import Sleeping, SquareLoss
from suite.pipeline.costs import LayerCost
from suite.pipeline.devices import DEVICES
from suite.pipeline.profile import MicroBatch, Sample
from suite.pipeline.recipe import Recipe
from suite.pipeline.simulate import Link, StageCost, simulate
from suite.settings import OptimizerSettings, PipelineSettings

SLEEP_S = 0.040
"""The mean sleep that stands for a forward, at every K and M alike: waking up late weighs the same in all."""

MESSAGE_BYTES = 1 << 20
"""Of a message between stages in the efficiency table: activations of (4, 128, 512) in fp32."""


@dataclass(frozen=True)
class SleepingWork:
    """A pipeline of sleeping layers, one a stage."""

    seconds: tuple[tuple[float, float], ...]
    """(forward, backward) of each stage and micro-batch."""
    micro_batches: int
    message_bytes: int = MESSAGE_BYTES
    name: str = "sleeping"

    @property
    def pipeline(self) -> PipelineSettings:
        """One stage a layer."""
        return PipelineSettings(stages=len(self.seconds), micro_batches=self.micro_batches)

    @property
    def optimizer(self) -> OptimizerSettings:
        """Plain."""
        return OptimizerSettings()

    @property
    def threads(self) -> int | None:
        """One: sleeping takes none."""
        return 1

    def key(self) -> str:
        """All of it."""
        return repr(self)

    def build(self) -> tuple[list[nn.Module], nn.Module]:
        """A sleeping layer a stage."""
        with torch.device("meta"):
            return [Sleeping(forward, backward) for forward, backward in self.seconds], SquareLoss()

    def sample(self) -> Sample:
        """A tensor as large as the message."""
        x = torch.ones(max(1, self.message_bytes // 4))
        one = MicroBatch((x,), (torch.zeros(1),))
        return Sample(one, one)


@dataclass(frozen=True)
class Measurement:
    """What was measured of a sleeping pipeline: seconds of its steps, and its stages' (F, R, B) measured alone."""

    seconds: tuple[float, ...]
    alone: tuple[LayerCost, ...]
    overheads: tuple[float, ...] = ()
    """The share of each step that the engine itself took, on the stage where it was largest."""

    @property
    def median(self) -> float:
        """Of the steps."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """(slowest - fastest) / median."""
        return (max(self.seconds) - min(self.seconds)) / self.median


Measure = Callable[[SleepingWork], Measurement]


def simulated_step(
    costs: Sequence[LayerCost], micro_batches: int, message_bytes: int = 0, link: Link | None = None
) -> float:
    """Returns the simulator's step over stages of these costs; without a link messages take no time."""
    stages = [
        StageCost(cost.forward_s, cost.rebuild_s, cost.backward_s, sends=message_bytes, returns=message_bytes)
        for cost in costs
    ]
    return simulate(Recipe().actions(len(stages), micro_batches), stages, link or Link()).seconds


def closed_form(cost: LayerCost, stages: int, micro_batches: int) -> float:
    """Returns (M+K-1)(F+B) + (M-1)R, the limit of a fill-drain step over equal stages whose rebuild starts early."""
    both = cost.forward_s + cost.backward_s
    return (micro_batches + stages - 1) * both + (micro_batches - 1) * cost.rebuild_s


EFFICIENCY_CASES = ((2, 8), (4, 8), (8, 8), (8, 32), (16, 64))
EFFICIENCY_F_S = 0.020
HEAVIER = 1.3


def efficiency_table(measure: Measure, report: Report = silent) -> Table:
    """Returns how near the executor comes to the limit, F : R : B = 1 : 1 : 2, equal stages and one 30% heavier."""
    rows: list[list[Value]] = []
    for heavier in (False, True):
        for stages, micro_batches in EFFICIENCY_CASES:
            report(len(rows), 2 * len(EFFICIENCY_CASES), f"K = {stages}, M = {micro_batches}")
            work = SleepingWork(tuple(_stage(k, stages, heavier) for k in range(stages)), micro_batches)
            found = measure(work)
            simulated = simulated_step(found.alone, micro_batches)
            limit = simulated if heavier else closed_form(found.alone[0], stages, micro_batches)
            what = f"stage {stages // 2} 30% heavier" if heavier else "equal"
            rows.append(
                [
                    stages, micro_batches, what, found.median, found.spread, simulated, limit, limit / found.median,
                    statistics.median(found.overheads),
                ]
            )  # fmt: skip
    headings = (
        "K", "M", "stages", "step s (measured)", "spread", "step s (simulated)", "limit s (computed)", "efficiency",
        "overhead (measured)",
    )  # fmt: skip
    notes = [
        f"Sleeping stages, F = {EFFICIENCY_F_S * 1e3:.0f} ms, B = 2F; {MESSAGE_BYTES >> 20} MiB a message over gloo, "
        "one process a stage. F, R and B of the limit are measured alone, in one process.",
        "Limit: (M+K-1)(F+B) + (M-1)R for equal stages, the simulated step for unequal ones.",
        "Efficiency = limit / measured median; spread = (slowest - fastest) / median of the steps.",
        "Overhead = the share of a step that a stage neither computes (sleeps) nor waits for a neighbour, on the stage "
        "where it is largest, in the median of the steps.",
    ]
    return Table("efficiency", "Efficiency of the fill-drain executor, sleeping stages", headings, rows, notes)


def _stage(k: int, stages: int, heavier: bool) -> tuple[float, float]:
    factor = HEAVIER if heavier and k == stages // 2 else 1.0
    return EFFICIENCY_F_S * factor, 2 * EFFICIENCY_F_S * factor


def table_2(measure: Measure, report: Report = silent) -> Table:
    """Returns Table 2's Transformer-48: speed over K and M, relative to K = 2, M = 1."""
    numbers = printed("table2.transformer")
    cases = [(stages, micro_batches) for micro_batches in numbers["M"] for stages in numbers["K"]]
    paper = dict(zip(cases, (speed for row in numbers["speed"] for speed in row), strict=True))
    rows = _speeds(numbers["layers"], "TPUv3", cases, paper, measure, False, report)
    k8 = _ratio(rows, 32, 8, 2)
    notes = [
        f"K = 8 over K = 2 at M = 32: measured {k8:.3f}, closed form {_closed_ratio(32, 8, 2):.3f}, 3.517 where the "
        "last micro-batch is rebuilt too, the paper's table 3.50.",
        *_common_notes(),
        numbers["note"],
    ]
    return _speed_table("table-2", "Table 2, Transformer-48: speed over K = 2, M = 1", rows, notes)


def table_3(measure: Measure, report: Report = silent) -> Table:
    """Returns Table 3's Transformer-24 on P100s without NVLink: speed over K, relative to K = 2, at M = 32."""
    numbers = printed("table3.transformer")
    cases = [(stages, numbers["M"]) for stages in numbers["K"]]
    paper = dict(zip(cases, numbers["speed"], strict=True))
    rows = _speeds(numbers["layers"], "P100", cases, paper, measure, True, report)
    notes = [
        *_common_notes(),
        "Measured: messages of the size that they would have, times the factor of the sleeps, over gloo. "
        f"Simulated: the same bytes at a P100's {DEVICES['P100'].link / 1e9:.0f} GB/s through the host.",
        numbers["note"],
    ]
    return _speed_table("table-3", "Table 3, Transformer-24 without NVLink: speed over K = 2, M = 32", rows, notes)


def _common_notes() -> list[str]:
    return [
        "Rows 'equal' divide the model evenly, the head's share included. Rows 'as cut' sleep what the planned cells "
        "would take, embedding and head included: whole layers do not divide evenly, and the heaviest cell decides.",
        "Measured: the executor over sleeping stages, one process each, calibrated to the estimated layer costs, each "
        f"row slowed down until a forward sleeps {SLEEP_S * 1e3:.0f} ms in the mean; the speeds have that taken out.",
    ]


def _speed_table(name: str, title: str, rows: list[dict[str, Any]], notes: list[str]) -> Table:
    headings = (
        "K", "M", "cells", "slowed down", "step s (measured)", "spread", "speed (measured)", "speed (simulated)",
        "speed, closed form (computed)", "speed (paper)", "ours / paper",
    )  # fmt: skip
    values: list[list[Value]] = [
        [
            row["K"],
            row["M"],
            row["cells"],
            row["slowed"],
            row["step"],
            row["spread"],
            row["measured"],
            row["simulated"],
            row["closed"],
            row["paper"],
            row["measured"] / row["paper"] if row["paper"] else None,
        ]
        for row in rows
    ]
    return Table(name, title, headings, values, notes)


def _speeds(
    layers: int, device: str, cases: Sequence[tuple[int, int]], paper: dict[tuple[int, int], float], measure: Measure,
    link_as_well: bool, report: Report,
) -> list[dict[str, Any]]:  # fmt: skip
    """Measures each case twice, cells equal and cells as cut, and relates the speeds to the first case."""
    rows: list[dict[str, Any]] = []
    most = max(micro_batches for _, micro_batches in cases)
    total = len(cases) + sum(micro_batches == most for _, micro_batches in cases)
    for cut in (False, True):
        for stages, micro_batches in cases:
            if cut and micro_batches != most:
                continue
            report(len(rows), total, f"K = {stages}, M = {micro_batches}, cells {'as cut' if cut else 'equal'}")
            seconds, message, slowed = cell_seconds(layers, device, stages, micro_batches, cut)
            work = SleepingWork(seconds, micro_batches, message if link_as_well else MESSAGE_BYTES // 16)
            found = measure(work)
            mean = _mean(found.alone)
            rows.append(
                {
                    "K": stages, "M": micro_batches, "cells": "as cut" if cut else "equal",
                    "slowed": slowed, "step": found.median, "spread": found.spread,
                    "simulated_s": simulated_step(
                        found.alone, micro_batches, message, DEVICES[device].messages if link_as_well else None
                    ),
                    "closed_s": closed_form(mean, stages, micro_batches), "paper": paper[stages, micro_batches],
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

    The mini-batch is one, whatever K and M: a micro-batch takes 1/M of it, a stage about 1/K of the model. The factor
    makes a stage's forward ``SLEEP_S`` in the mean.
    """
    shape = LanguageModelShape(layers)
    cluster = Cluster(stages, DEVICES[device].memory, "gpu", device=replace(DEVICES[device], memory=2**62))
    work = LanguageModel(shape, PipelineSettings(stages=stages, micro_batches=BATCH))
    planned = make(work, replace(cluster, bytes_per_device=2**62), estimated_price)
    costs = [stage.cost for stage in planned.plan.stages]
    forward, backward = (sum(getattr(cost, name) for cost in costs) for name in ("forward_s", "backward_s"))
    part = BATCH / micro_batches  # of the mini-batch, in the micro-batches that were estimated
    slowed = SLEEP_S / (forward * part / stages)
    message = int(max(cost.sends for cost in costs) * part * slowed)
    factor = part * slowed
    if cut:
        return tuple((cost.forward_s * factor, cost.backward_s * factor) for cost in costs), message, slowed
    return ((forward / stages * factor, backward / stages * factor),) * stages, message, slowed


def _mean(costs: Sequence[LayerCost]) -> LayerCost:
    return replace(
        costs[0],
        forward_s=statistics.fmean(cost.forward_s for cost in costs),
        rebuild_s=statistics.fmean(cost.rebuild_s for cost in costs),
        backward_s=statistics.fmean(cost.backward_s for cost in costs),
    )


def _ratio(rows: list[dict[str, Any]], micro_batches: int, stages: int, base: int) -> float:
    speeds = {row["K"]: row["measured"] for row in rows if row["M"] == micro_batches and row["cells"] == "equal"}
    return float(speeds[stages] / speeds[base])


def _closed_ratio(micro_batches: int, stages: int, base: int) -> float:
    """The closed form's speed-up with F = R = 1, B = 2 for the whole model, shared by the stages."""

    def step(count: int) -> float:
        return ((micro_batches + count - 1) * 3 + micro_batches - 1) / count

    return step(base) / step(stages)
