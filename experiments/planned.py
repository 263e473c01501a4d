"""What a plan is: what it is made from, and how it is told, as a record and as lines for a person."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.cluster import GIB, Cluster
from experiments.workload import Measurable, Workload
from suite.pipeline.costs import LayerCost
from suite.pipeline.placement import Placement
from suite.pipeline.plan import Machine, Plan


@dataclass(frozen=True)
class Price:
    """Layer costs of a workload on a cluster's devices, and where they come from."""

    costs: tuple[LayerCost, ...]
    machine: Machine
    source: str
    measured: bool
    file: Path | None = None
    """Where measured costs are kept."""


Pricer = Callable[[Measurable, Cluster], Price]


@dataclass(frozen=True)
class Planned:
    """A plan and all that is said of it."""

    work: Workload
    cluster: Cluster
    price: Price
    plan: Plan
    parameters: int
    notes: tuple[str, ...] = ()
    placement: Placement | None = None
    """Of several nodes, which worker goes where."""

    @property
    def step_s(self) -> float:
        """Predicted seconds of a step."""
        return self.plan.step_s

    @property
    def units_per_second(self) -> float:
        """Of all replicas."""
        return self.work.batch / self.step_s

    @property
    def hours(self) -> float:
        """To the last step."""
        return self.work.steps * self.step_s / 3600

    @property
    def kind(self) -> str:
        """How the seconds were come by."""
        return f"simulated from {'measured' if self.price.measured else 'estimated'} layer costs"

    def as_dict(self) -> dict[str, Any]:
        """Returns what ``make plan FORMAT=json`` prints: seconds, bytes, counts."""
        plan, pipeline = self.plan, self.plan.pipeline
        return {
            "name": self.work.name, "cluster": str(self.cluster), "costs": self.price.source,
            "measured": self.price.measured, "parameters": self.parameters,
            "layers": sum(plan.cells), "K": pipeline.stages, "M": pipeline.micro_batches, "R": pipeline.replicas,
            "schedule": plan.recipe.schedule, "turns": plan.recipe.turns, "remat": pipeline.remat,
            "rebuilt": plan.rebuilds[0], "forwards": plan.rebuilds[1], "cells": list(plan.cells),
            "step_s": self.step_s, "limit_s": plan.limit_s,
            f"{self.work.unit}_per_second": self.units_per_second, "bubble": plan.timeline.bubble,
            "steps": self.work.steps, "hours": self.hours, "device_bytes": plan.limit + plan.reserve,
            "reserve_bytes": plan.reserve, "notes": list(self.notes),
            "nodes": [node.name for node in self.placement.nodes] if self.placement is not None else [],
            "stages": [
                {
                    "first_layer": stage.begin, "last_layer": stage.end - 1, "parameters": stage.parameters,
                    "forward_s": stage.cost.forward_s, "rebuild_s": stage.cost.rebuild_s,
                    "backward_s": stage.cost.backward_s, "update_s": stage.cost.update_s,
                    "sends_bytes": stage.cost.sends, "returns_bytes": stage.cost.returns,
                    "idle": plan.timeline.idle(k % pipeline.stages), "peak_bytes": stage.peak_bytes,
                }
                for k, stage in enumerate(plan.stages)
            ],
        }  # fmt: skip

    def lines(self) -> list[str]:
        """Returns the plan for a person to read."""
        plan, pipeline = self.plan, self.plan.pipeline
        most = max(stage.peak_bytes for stage in plan.stages)
        return [
            f"plan of {self.work.name} on {self.cluster}; {self.kind} ({self.price.source})",
            *(f"  {note}" for note in self.notes),
            f"  {sum(plan.cells)} layers, {self.parameters:,} parameters; K = {pipeline.stages}, "
            f"M = {pipeline.micro_batches}, R = {pipeline.replicas}; {_walked(plan)}",
            *_stage_lines(plan),
            *_copies(plan, self.parameters),
            f"  step {in_seconds(self.step_s)} (lower bound {in_seconds(plan.limit_s)}), "
            f"bubble {plan.timeline.bubble:.1%}, {in_figures(self.units_per_second)} {self.work.unit}/s, "
            f"heaviest stage {most / GIB:.2f} of {plan.limit / GIB:.2f} GiB{_reserved(plan)}",
            f"  {self.work.steps:,} steps of {self.work.batch:,} {self.work.unit}: {in_hours(self.hours * 3600)}",
            *(self.placement.lines() if self.placement is not None else ()),
        ]


def _reserved(plan: Plan) -> str:
    """Returns what of a device the plan leaves free, in words."""
    whole = plan.limit + plan.reserve
    return f" ({whole / GIB:.2f} GiB less a reserve of {plan.reserve / whole:.0%})" if plan.reserve else ""


def _copies(plan: Plan, parameters: int) -> Iterator[str]:
    """Yields why stages have more parameters than the model, where they do."""
    held = sum(stage.parameters for stage in plan.stages)
    if held > parameters:
        yield (
            f"  stages hold {held:,} parameters in all: {held - parameters:,} of them are copies of parameters that "
            "layers of several stages share"
        )


def _walked(plan: Plan) -> str:
    """Returns what the stages walk, in words."""
    again, all_ = plan.rebuilds
    turns = f", {plan.recipe.turns} cells a stage" if plan.recipe.turns > 1 else ""
    return f"{plan.recipe.schedule}{turns}, {again} of {all_} forwards rebuilt"


def _stage_lines(plan: Plan) -> Iterator[str]:
    """Yields a line a stage; a run of stages that are alike shares one."""
    first = 0
    for k, stage in enumerate(plan.stages):
        following = plan.stages[k + 1] if k + 1 < len(plan.stages) else None
        if following is not None and (k + 1) % plan.pipeline.stages and _alike(stage, following):
            continue
        stages = plan.pipeline.stages
        name = f"stage {k % stages}" if first == k else f"stages {first % stages}-{k % stages}"
        if plan.recipe.turns > 1:
            name += f", cell {k // stages}"
        begin, cost = plan.stages[first].begin, stage.cost
        each = "" if first == k else " each"
        yield (
            f"  {name}: layers {begin}-{stage.end - 1} ({stage.end - stage.begin}{each}), "
            f"{stage.parameters:,} parameters, F {in_seconds(cost.forward_s)} R {in_seconds(cost.rebuild_s)} "
            f"B {in_seconds(cost.backward_s)}, idle {plan.timeline.idle(k % stages):.1%}, "
            f"{stage.peak_bytes / GIB:.2f} GiB"
        )
        first = k + 1


def _alike(one: Any, other: Any) -> bool:
    return (one.end - one.begin, one.cost) == (other.end - other.begin, other.cost)


def in_seconds(value: float) -> str:
    """Returns a span of time with its unit."""
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.2f} ms"


def in_figures(value: float) -> str:
    """Returns a number with at least two figures that count, such as 0.042, 3.1, 47 or 1,200."""
    if value >= 10 or value <= 0:
        return f"{value:,.0f}"
    digits = 1 - math.floor(math.log10(value))
    return f"{value:.{digits}f}"


def in_hours(seconds: float) -> str:
    """Returns a span of time in hours, or in minutes or seconds where it is short."""
    if seconds >= 3600:
        return f"{seconds / 3600:,.2f} hours"
    return f"{seconds / 60:.1f} minutes" if seconds >= 60 else in_seconds(seconds)
