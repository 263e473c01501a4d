"""Traits of layers on which training depends, which ``gpipe check`` names.

generators before and after a forward      other states       it draws random numbers
buffers before and after                   other values       each forward changes them
attributes before and after                other values       it remembers something that is no buffer
with neighbours in place of other rows     other rows         its rows depend on each other
in evaluation mode                         other values       it computes something else there
backward                                   no gradient        it ignores an input or a parameter
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from experiments.custom.trial import CPU, KEEP_STATE, ROUNDING, SEED, Trial, equal, same_bits, trials
from suite.device import one_thread
from suite.errors import typed_line
from suite.pipeline.model.layers import Tensors, materialize


@dataclass(frozen=True)
class Trait:
    text: str
    """A sentence without its subject, the layer."""
    remedy: str = ""
    """What to do if it is not meant; empty for what most models mean."""
    is_fault: bool = False
    """Whether other micro-batches train another model, and no user means it."""
    depends_on_split: bool = False
    """Whether the layer computes something else where a mini-batch is split into other micro-batches."""


LayerTraits = dict[int, tuple[str, list[Trait]]]
"""The type and the traits of each layer that has some, by index."""


def has_state(trial: Trial, rows: int) -> Iterator[Trait]:
    """Random numbers, attributes and buffers."""
    if trial.draws:
        yield Trait("draws random numbers, with a seed for each micro-batch", depends_on_split=True)
    for change in trial.changed_attributes:
        yield Trait(f"{change} in each forward, and again in each recompute", KEEP_STATE)
    if buffers := trial.changed_buffers:
        others = f" and {len(buffers) - 1} more" if len(buffers) > 1 else ""
        yield Trait(f"changes its buffer {buffers[0]}{others} in each forward", depends_on_split=True)


def mixes_rows(trial: Trial, rows: int) -> Iterator[Trait]:
    """Rows that give something else with other rows beside them."""
    if rows > 1 and any(_depends_on_others(trial, rows, kept) for kept in (0, 1)):
        remedy = "" if trial.changed_buffers else "mix no rows, or other micro-batches train another model"
        yield Trait("has rows that depend on the other rows of their micro-batch", remedy, depends_on_split=True)


def evaluates_differently(trial: Trial, rows: int) -> Iterator[Trait]:
    """Other values in evaluation mode, without random numbers or buffers as a reason."""
    if not (trial.draws or trial.changed_buffers or equal(trial.first, trial.fresh(trial.inputs, training=False))):
        yield Trait("computes something else in evaluation mode")


def ignores_tensors(trial: Trial, rows: int) -> Iterator[Trait]:
    """Inputs or parameters on which no output depends."""
    for name, gradient in trial.gradients.items():
        if gradient is None:
            yield Trait(f"ignores its {name}: no gradient reaches it", "use it or leave it out")


TRAITS = (has_state, mixes_rows, evaluates_differently, ignores_tensors)


def traits_of(trial: Trial, rows: int) -> list[Trait]:
    """Returns the traits of a layer in training mode. A micro-batch has ``rows`` rows."""
    if not all(map(same_bits, trial.first, trial.fresh(trial.inputs))):  # the others would compare them
        return [Trait("returns other values for the same inputs and seeds", KEEP_STATE)]
    return [trait for rule in TRAITS for trait in rule(trial, rows)]


def find_traits(layers: Sequence[nn.Module], loss: nn.Module, inputs: Tensors, targets: Tensors) -> LayerTraits:
    """Runs a micro-batch through all layers and the loss. A last layer with a ``gpipe_score`` is not tried."""
    found: LayerTraits = {}
    outputs: dict[int, Tensors] = {}
    rows, last = len(inputs[0]), len(layers) - 1
    with one_thread():
        for index, trial in trials(layers, inputs, partial(materialize, seed=SEED, device=CPU)):
            if index == last and getattr(layers[index], "gpipe_score", None):
                break
            try:
                if isinstance(trial, int):
                    outputs[index], traits = outputs[trial], found[trial][1] if trial in found else []
                else:
                    outputs[index], traits = trial.first, traits_of(trial, rows)
                if index == last:
                    traits = [*traits, *loss_traits(loss, (*outputs[index], *targets), rows)]
            except Exception as error:  # of the user's code
                traits = [Trait(f"cannot be tried alone ({typed_line(error)})")]
            if traits:
                found[index] = type(layers[index]).__name__, traits
            if index not in outputs:
                break
    return found


def loss_traits(loss: nn.Module, tensors: Tensors, rows: int) -> Iterator[Trait]:
    """Yields a trait of the last layer if the loss summed over a micro-batch is not the sum over its halves.
    ``tensors`` are outputs and targets."""
    half = rows // 2
    parts = (torch.arange(rows), torch.arange(half), torch.arange(half, rows)) if half else ()
    sums = [float(loss(*_rows_of(tensors, rows, part))[0]) for part in parts]
    if sums and sums[0] != float(loss(*tensors)[0]):  # it draws random numbers
        return
    if sums and abs(sums[0] - sums[1] - sums[2]) > 100 * ROUNDING * max(map(abs, sums)):
        totals = "{:.4g} for {} rows, {:.4g} and {:.4g} for their halves".format(sums[0], rows, *sums[1:])
        remedy = "return a mean over rows, or give units (docs/own-model.md)"
        yield Trait(f"ends in a loss that is no mean over rows: its sums are {totals}", remedy, is_fault=True)


def _depends_on_others(trial: Trial, rows: int, kept: int) -> bool:
    """Whether every second row, from ``kept`` on, gives something else once each other row is a copy of its neighbour.

    kept = 0: rows 0 0 2 2 4      kept = 1: rows 1 1 1 3 3
    """
    sources = torch.tensor([row if row % 2 == kept else abs(row - 1) for row in range(rows)])
    has_rows = [tensor.dim() > 0 and len(tensor) == rows for tensor in trial.inputs]
    changed = tuple(tensor[sources] if own else tensor for tensor, own in zip(trial.inputs, has_rows, strict=True))
    if not any(has_rows):  # a layer on sequences may have them on its second axis
        changed = _rows_of(trial.inputs, rows, sources)
    own = torch.arange(kept, rows, 2)
    return not equal(_rows_of(trial.first, rows, own), _rows_of(trial.fresh(changed), rows, own))


def _rows_of(tensors: Tensors, rows: int, chosen: Tensor) -> Tensors:
    """Returns the chosen rows, along the first axis that is as long as there are rows; a tensor without one whole."""
    axes = [next((axis for axis, size in enumerate(tensor.shape) if size == rows), None) for tensor in tensors]
    return tuple(
        tensor if axis is None else tensor.index_select(axis, chosen)
        for tensor, axis in zip(tensors, axes, strict=True)
    )
