"""Contradictions between the settings of a run that all tasks have."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from suite.errors import SettingError
from suite.pipeline.planning.partition import cell_ranges
from suite.pipeline.schedule import config
from suite.settings import LoopSettings, OptimizerSettings, PipelineSettings
from suite.training.profiling import profiled_steps


def contradictions(pipeline: PipelineSettings, train: LoopSettings, layers: int) -> list[str]:
    """Returns all of them, in sentences; ``layers`` is the number of the model's."""
    errors = _pipeline_errors(pipeline, layers)
    if train.patience is not None and train.validate_every is None:
        errors.append(
            f"train.patience={train.patience} counts validations, and train.validate_every is none; set it too"
        )
    if train.profile_steps is not None:
        errors += faults_of(profiled_steps, train.profile_steps, train.steps)
    return errors


def faults_of(check: Callable[..., object], *arguments: object) -> list[str]:
    """Returns what is wrong by a check that raises SettingError, in a list; empty if nothing is."""
    try:
        check(*arguments)
    except SettingError as fault:
        return [str(fault)]
    return []


def _pipeline_errors(pipeline: PipelineSettings, count: int) -> list[str]:
    """Returns all faults of K, the schedule and the cells set by hand; ``count`` are the layers."""
    stages, cells = pipeline.stages, pipeline.layers_per_cell
    errors = config.pipeline_errors(pipeline, count)
    if stages > count:
        some = f"{count} layers; use 1 to {count} stages" if count > 1 else "1 layer; use 1 stage"
        errors.append(f"pipeline.stages is {stages}, the model has {some}")
    if cells is not None and len(cells) != stages * pipeline.virtual_stages:
        each = f" of {pipeline.virtual_stages} cells each" if pipeline.virtual_stages > 1 else ""
        errors.append(
            f"pipeline.layers_per_cell has {len(cells)} cells, pipeline.stages is {stages}{each}; make them equal"
        )
    return errors if cells is None else [*errors, *faults_of(cell_ranges, cells, count)]


def unreached(train: LoopSettings, rates: OptimizerSettings) -> Iterator[str]:
    """Yields what the run is too short for, as a trial of a long one is: validations, an early end, a wsd decay."""
    every, patience, steps = train.validate_every, train.patience, train.steps
    phases = (rates.warmup_steps, rates.lr_stable_steps, rates.lr_decay_steps)
    if rates.lr_decay == "wsd" and sum(phases) > steps:
        yield (
            "optimizer.warmup_steps={}, lr_stable_steps={} and lr_decay_steps={}".format(*phases)
            + f" are {sum(phases)} steps, and train.steps={steps} ends before them"
        )
    longest = (steps - 1) // (every or 1) - 1  # the first validation improves, the one at the end ends nothing
    if every is not None and every > steps:
        yield f"train.validate_every={every} is longer than the run of {steps} steps, which validates at its end alone"
    elif every is not None and patience is not None and patience > longest:
        remedy = f"use train.patience={longest} or less" if longest > 0 else "use a smaller train.validate_every"
        yield (
            f"train.patience={patience} cannot end this run early: it has {steps // every} validations, one every "
            f"{every} of {steps} steps; {remedy}"
        )
