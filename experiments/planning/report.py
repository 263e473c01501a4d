"""A plan's report, as a record and as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from experiments.base.cluster import Cluster
from experiments.base.experiment import Experiment
from experiments.base.figures import in_figures, in_hour_interval, in_hours, in_seconds
from experiments.base.hints import option
from experiments.planning.pipeline_settings import changed_settings
from experiments.planning.problem import LayerCosts
from experiments.report.table import Value, aligned
from models.chunked_loss import set_logits_bytes
from suite.pipeline.planning.devices import DEVICES, GIB, Machine
from suite.pipeline.planning.estimate import estimate
from suite.pipeline.planning.fit import Problem
from suite.pipeline.planning.flops import StepFlops, step_flops
from suite.pipeline.planning.placement import Placement
from suite.pipeline.planning.plan import Alternative, CellPlan, Plan
from suite.pipeline.planning.simulate import Links
from suite.settings import PipelineSettings

COSTS = ("forward_s", "recompute_s", "backward_s", "update_s", "activation_bytes", "gradient_bytes")
"""The costs of a stage that the record of a plan has."""


@dataclass(frozen=True)
class PlanReport:
    """A plan and its report."""

    experiment: Experiment
    cluster: Cluster
    layer_costs: LayerCosts
    """As the cost model returned them; those of another shape are the same."""
    problem: Problem
    plan: Plan
    parameters: int
    notes: tuple[str, ...] = ()
    placement: Placement | None = None
    """Which worker runs where, on several nodes."""
    step_interval_s: tuple[float, float] | None = None
    """Seconds of a step at the highest and lowest efficiency of a declared device; None for measured costs."""

    @property
    def step_s(self) -> float:
        return self.plan.step_s

    @property
    def units_per_second(self) -> float:
        """Throughput of all replicas."""
        return self.experiment.batch / self.step_s

    @property
    def hours(self) -> float:
        return self.experiment.train.steps * self.step_s / 3600

    @property
    def hours_interval(self) -> tuple[float, float] | None:
        """The least and most hours of the whole run, from the interval of a step."""
        if self.step_interval_s is None:
            return None
        low, high = self.step_interval_s
        return self.experiment.train.steps * low / 3600, self.experiment.train.steps * high / 3600

    def step_flops(self) -> StepFlops | None:
        """Counts the operations of a step per unit, for the shapes of a typical micro-batch; None if there are none.

        Raises what the layers raise on fake tensors.
        """
        layers, loss = self.experiment.build()
        set_logits_bytes(layers, 1 << 62)  # chunks are computed again, which is not model work
        sample, pipeline = self.experiment.sample(), self.plan.pipeline
        costs = estimate(layers, loss, sample.typical, DEVICES["TPUv3"], self.experiment.optimizer)
        units = sample.units or self.experiment.batch / (pipeline.replicas * pipeline.micro_batches)
        shape = self.plan.layers_per_cell, self.plan.schedule_config, pipeline.stages, pipeline.micro_batches
        flops = step_flops(costs, *shape, units)
        return flops if flops.model_per_unit else None

    @property
    def kind(self) -> str:
        return f"simulated from {'measured' if self.layer_costs.measured else 'estimated'} layer costs"

    def as_dict(self) -> dict[str, Any]:
        """Returns the record that ``make plan FORMAT=json`` prints: seconds, bytes, counts."""
        plan, pipeline = self.plan, self.plan.pipeline
        placement = plan.schedule_config.placement(pipeline.stages)
        return {
            "name": self.experiment.name,
            "cluster": str(self.cluster),
            "costs": self.layer_costs.source,
            "measured": self.layer_costs.measured,
            "parameters": self.parameters,
            "layers": sum(plan.layers_per_cell),
            "K": pipeline.stages,
            "M": pipeline.micro_batches,
            "R": pipeline.replicas,
            "schedule": plan.schedule_config.schedule,
            "virtual_stages": plan.schedule_config.virtual_stages,
            "remat": pipeline.remat,
            "recomputed": plan.recomputes[0],
            "forwards": plan.recomputes[1],
            "cells": list(plan.layers_per_cell),
            "step_s": self.step_s,
            "step_interval_s": self.step_interval_s,
            "lower_bound_s": plan.lower_bound_s,
            f"{self.experiment.unit}_per_second": self.units_per_second,
            "bubble": plan.timeline.bubble,
            "steps": self.experiment.train.steps,
            "hours": self.hours,
            "hours_interval": self.hours_interval,
            "device_bytes": plan.machine.memory_limit_bytes + plan.machine.reserve,
            "reserve_bytes": plan.machine.reserve,
            "schedules": [_alternative_record(alternative, pipeline) for alternative in plan.alternatives],
            "notes": list(self.notes),
            "nodes": [node.name for node in self.placement.nodes] if self.placement is not None else [],
            "stages": [
                {
                    "stage": placement.stage_of(k),
                    "cell": placement.virtual_stage_of(k),
                    "first_layer": stage.begin,
                    "last_layer": stage.end - 1,
                    "parameters": stage.parameters,
                    **{name: getattr(stage.cost, name) for name in COSTS},
                    "idle": plan.timeline.idle(placement.stage_of(k)),
                    "peak_bytes": stage.peak_bytes,
                    "process_bytes": stage.process_bytes,
                }
                for k, stage in enumerate(plan.cells)
            ],
        }

    def lines(self, is_brief: bool = False) -> list[str]:
        """Returns the report as text; a brief one leaves out all schedules but a faster one."""
        plan, pipeline = self.plan, self.plan.pipeline
        workers, devices = pipeline.stages * pipeline.replicas, self.cluster.devices
        idle = devices - workers if self.cluster.kind == "gpu" or self.layer_costs.device is not None else 0
        largest = max(plan.cells, key=lambda cell: cell.peak_bytes)
        return [
            f"plan of {self.experiment.name} on {self.cluster}; {self.kind} ({self.layer_costs.source})",
            *(f"  {note}" for note in self.notes),
            *([f"  {workers} of the {devices} devices are used, {idle} are idle"] if idle > 0 else ()),
            f"  {sum(plan.layers_per_cell)} layers, {self.parameters:,} parameters; K = {pipeline.stages}, "
            f"M = {pipeline.micro_batches}, R = {pipeline.replicas}; {_name_of(plan)}, "
            f"{plan.recomputes[0]} of {plan.recomputes[1]} forwards recomputed",
            *_stage_lines(plan),
            *_shared_parameters_line(plan, self.parameters),
            f"  step {in_seconds(self.step_s)}; with these cells no schedule can take less than "
            f"{in_seconds(min(plan.lower_bound_s, self.step_s))}",
            f"  bubble {plan.timeline.bubble:.1%}, {in_figures(self.units_per_second)} {self.experiment.unit}/s, "
            f"largest stage {largest.peak_bytes / GIB:.2f} of {plan.machine.memory_limit_bytes / GIB:.2f} GiB"
            f"{_reserve_text(plan.machine)}{self._process_text(largest)}",
            f"  {self.experiment.train.steps:,} steps of {self.experiment.batch:,} {self.experiment.unit}: "
            f"{self._duration()}",
            *(() if is_brief else _alternative_lines(plan)),
            *_faster_line(plan),
            *(self.placement.lines() if self.placement is not None else ()),
        ]

    def _process_text(self, cell: CellPlan) -> str:
        """Describes the part of a stage's peak on a GPU that is no tensor. NCCL's part is always declared."""
        if self.cluster.kind != "gpu" or not cell.process_bytes:
            return ""
        return f", {cell.process_bytes / GIB:.2f} GiB of it for CUDA and NCCL"

    def _duration(self) -> str:
        """Describes how long the run takes: estimated as an interval, measured as a number."""
        device, interval = self.layer_costs.device, self.hours_interval
        if device is None or interval is None:
            return in_hours(self.hours * 3600)
        least, most = (in_hours(3600 * end) for end in interval)
        if least == most:
            return f"{least} (estimated; the speed of matrix products does not matter here)"
        low, high = device.efficiency_range
        peak = "the peak" if device.efficiency < 1 else "the measured rate"
        hours = in_hour_interval(3600 * interval[0], 3600 * interval[1])
        return (
            f"{hours} (matrix products at {high:.0%} to {low:.0%} of {peak}; that range is a choice, not a measurement)"
        )


def _reserve_text(machine: Machine) -> str:
    whole = machine.memory_limit_bytes + machine.reserve
    return f" ({whole / GIB:.2f} GiB minus a reserve of {machine.reserve / whole:.0%})" if machine.reserve else ""


def _shared_parameters_line(plan: Plan, parameters: int) -> Iterator[str]:
    """Yields a line if stages have more parameters than the model."""
    total = sum(stage.parameters for stage in plan.cells)
    if total > parameters:
        yield f"  the stages hold {total:,} parameters in total; {total - parameters:,} are copies that several share"


def _alternative_record(alternative: Alternative, chosen: PipelineSettings) -> dict[str, Any]:
    """Returns a schedule for the record; one that does not fit has only its fault."""
    own = alternative.pipeline
    name = {"schedule": own.schedule, "virtual_stages": own.virtual_stages}
    if alternative.fault:
        return name | {"chosen": False, "fault": alternative.fault}
    figures = {"step_s": alternative.step_s, "peak_bytes": alternative.peak_bytes}
    recomputes = dict(zip(("recomputed", "forwards"), alternative.recomputes, strict=True))
    return name | {"chosen": alternative.is_of(chosen)} | figures | recomputes


def _alternative_lines(plan: Plan) -> Iterator[str]:
    """Yields the table of the schedules that fit, and one line of those that do not; nothing if there is no choice."""
    if len(plan.alternatives) < 2:
        return
    rows = []
    for alternative in (alternative for alternative in plan.alternatives if not alternative.fault):
        figures = in_seconds(alternative.step_s), f"{alternative.peak_bytes / GIB:.2f} GiB"
        mark = "<- this plan" if alternative.is_of(plan.pipeline) else ""
        rows.append([_name_of(alternative), *figures, "{:,} of {:,}".format(*alternative.recomputes), mark])
    headings = "schedules that fit", "step", "largest stage", "forwards recomputed", ""
    yield from (f"  {line}" for line in aligned(headings, rows).splitlines())
    refused = [_name_of(alternative) for alternative in plan.alternatives if alternative.fault]
    if refused:
        yield f"  do not fit: {'; '.join(refused)}"


def _faster_line(plan: Plan) -> Iterator[str]:
    """Yields the setting of the fastest schedule that fits, if it is faster by more than a hundredth."""
    fitting = [alternative for alternative in plan.alternatives if not alternative.fault]
    fastest = min(fitting, key=lambda alternative: alternative.step_s, default=None)
    if fastest is not None and fastest.step_s < 0.99 * plan.step_s:
        own = fastest.pipeline
        setting = f'"pipeline.schedule={own.schedule} pipeline.virtual_stages={own.virtual_stages}"'
        yield f"  faster: {option('SET', setting)} ({in_seconds(fastest.step_s)}, {fastest.peak_bytes / GIB:.2f} GiB)"


def schedule_name(schedule: str, virtual_stages: int) -> str:
    """Returns a schedule's name, with its cells per stage if there are several."""
    name = "found by search" if schedule == "search" else schedule
    return f"{name}, {virtual_stages} cells per stage" if virtual_stages > 1 else name


def _name_of(plan: Plan | Alternative) -> str:
    return schedule_name(plan.pipeline.schedule, plan.pipeline.virtual_stages)


def _stage_lines(plan: Plan) -> Iterator[str]:
    """Yields one line per stage; consecutive equal stages share a line."""
    first, placement = 0, plan.schedule_config.placement(plan.pipeline.stages)
    cells = range(len(plan.cells))
    stages, virtual_stages = [*map(placement.stage_of, cells)], [*map(placement.virtual_stage_of, cells)]
    for k, stage in enumerate(plan.cells):
        size, own, following = stage.end - stage.begin, stages[k], None
        if virtual_stages[k : k + 2] == [virtual_stages[k]] * 2 and _goes_on(stages[first : k + 2]):
            following = plan.cells[k + 1]
        if following is not None and (following.end - following.begin, following.cost) == (size, stage.cost):
            continue
        name = f"stage {own}" if first == k else f"stages {stages[first]}-{own}"
        if plan.schedule_config.virtual_stages > 1:
            name += f", cell {virtual_stages[k]}"
        begin, cost = plan.cells[first].begin, stage.cost
        each = "" if first == k else " each"
        yield (
            f"  {name}: layers {begin}-{stage.end - 1} ({size}{each}), "
            f"{stage.parameters:,} parameters, F {in_seconds(cost.forward_s)} R {in_seconds(cost.recompute_s)} "
            f"B {in_seconds(cost.backward_s)}, idle {plan.timeline.idle(own):.1%}, {stage.peak_bytes / GIB:.2f} GiB"
        )
        first = k + 1


def _goes_on(stages: Sequence[int]) -> bool:
    """Whether each stage follows the one before it, or each precedes it."""
    return {after - before for before, after in pairwise(stages)} in ({1}, {-1})


def lines_of(plans: Sequence[PlanReport]) -> Iterator[str]:
    """Yields a table of the fastest plans of a run, as lines to print; nothing without plans."""
    if not plans:
        return
    yield f"the fastest plans of {plans[0].experiment.name}:"
    shown = "step", f"{plans[0].experiment.unit}/s", "whole run", "largest stage", "bubble", "links between nodes"
    rows: list[list[Value]] = []
    for report in plans:
        plan, pipeline, link = report.plan, report.plan.pipeline, report.plan.machine.link
        peak = max(cell.peak_bytes for cell in plan.cells) / GIB
        rows.append([
            pipeline.stages, pipeline.replicas, pipeline.micro_batches, _name_of(plan),
            in_seconds(report.step_s), in_figures(report.units_per_second), in_hours(3600 * report.hours),
            f"{peak:.2f} GiB", f"{plan.timeline.bubble:.1%}", len(link.cuts) if isinstance(link, Links) else 0,
        ])  # fmt: skip
    yield from (f"  {line}" for line in aligned(("K", "R", "M", "schedule", *shown), rows).splitlines())


def settings_of(report: PlanReport, work: Experiment) -> str:
    """Returns the pipeline settings with which another experiment has this plan."""
    wanted = report.plan.pipeline
    if wanted.schedule == "search":  # it is searched again, and found again
        wanted = report.experiment.pipeline
    return changed_settings(wanted, work.pipeline)
