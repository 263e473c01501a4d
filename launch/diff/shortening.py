"""Which layers of a model too large for one process ``gpipe check`` trains.

layers  0  1 1 1 1 1 1  2  3 3 3 3 3 3  4        rows of equal layers
kept    0  1 1          2  3 3          4        as many of each row as fit
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from itertools import groupby

from rich.console import Console
from torch import nn

from experiments.base.cluster import Cluster
from experiments.base.experiment import Experiment
from experiments.planning.single_plan import estimated_costs, try_plan
from launch.diff.plain_training import REMEDY, shortage
from launch.diff.short_training import shared_devices
from suite.errors import PlacementError, PlanError
from suite.pipeline.model.layers import structure_key
from suite.settings import PipelineSettings


def shortened_to_fit(
    chosen: Experiment, shapes_of: Callable[[int], Iterable[PipelineSettings]], console: Console
) -> Experiment:
    """Returns an experiment whose model is too large for one process with as many of its equal layers as fit there and
    in each pipeline; any other as it is. ``shapes_of`` returns the pipelines for a number of layers. Raises
    PlacementError when two of each row are too many, or no three layers in a row are equal."""
    if not (too_large := shortage(chosen)):
        return chosen
    console.print(f"{too_large}; looking for how many of its equal layers fit")

    def is_too_large(choice: Experiment) -> bool:
        shapes = map(choice.with_pipeline, shapes_of(choice.list_length))
        return bool(shortage(choice)) or any(map(memory_fault, shapes))

    rows = _rows(chosen.build()[0])
    choices = [_with_layers(chosen, rows, most) for most in range(2, max(map(len, rows)))]
    fitting = choices[: bisect(choices, False, key=is_too_large)]
    if not fitting:
        why = "two of each row of equal layers are too many" if choices else "no three equal layers are in a row"
        raise PlacementError(f"{too_large}, and {why}; {REMEDY}")
    console.print(f"of equal layers in a row the first {len(fitting) + 1} are kept; what is left is numbered anew")
    return fitting[-1]


def memory_fault(work: Experiment) -> str:
    """Returns what a pipeline needs and this machine does not have; empty if memory is not what it lacks."""
    devices = shared_devices()
    fault = _fault(work, devices)
    return fault if fault and not _fault(work, replace(devices, bytes_per_device=2**62)) else ""


def _rows(layers: Sequence[nn.Module]) -> list[list[int]]:
    """Returns the indices of equal layers in a row. One with skips or with a tied parameter is like no other: each has
    its counterpart elsewhere."""

    def key(index: int) -> Hashable:
        layer = layers[index]
        has_counterpart = any(getattr(layer, names, ()) for names in ("tied", "pops", "stashes"))
        return index if has_counterpart else structure_key(layer)

    return [list(row) for _, row in groupby(range(len(layers)), key)]


def _with_layers(chosen: Experiment, rows: Iterable[Sequence[int]], most: int) -> Experiment:
    """Returns the experiment with the first ``most`` layers of each row."""
    kept = tuple(index for row in rows for index in row[:most])
    shrunk = (*chosen.shrunk, f"layers {chosen.list_length} -> {len(kept)}")
    return chosen.model_copy(update={"kept_layers": kept, "shrunk": shrunk})


def _fault(work: Experiment, devices: Cluster) -> str:
    """Returns why there is no plan; empty if there is one."""
    try:
        try_plan(work, devices, estimated_costs)
    except PlanError as fault:
        return fault.errors[0]
    return ""
