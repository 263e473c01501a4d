"""The layers, the loss, the parameter groups and the first mini-batch of a TrainSpec, and what is wrong with them."""

from __future__ import annotations

import math
from functools import lru_cache

from torch import nn

from experiments.custom.batches import SpecBatches
from experiments.custom.layer_check import find_refusal
from experiments.custom.layers import all_on_meta, tie_shared
from experiments.custom.loading import load_spec
from experiments.custom.loss import SummedLoss
from suite.errors import SettingError, SuiteError, typed_line
from suite.pipeline.model.layers import Tensors
from suite.train_spec import TrainSpec


def build(spec: TrainSpec) -> tuple[list[nn.Module], nn.Module]:
    """Returns the layers on the meta device, and the loss. Raises SettingError for layers that cannot be used."""
    layers = list(spec.layers)
    tie_shared(layers)
    _, targets = SpecBatches(spec, rows=1, seed=0).whole(0)
    return all_on_meta(layers), SummedLoss(spec, len(targets))


def update_factors(spec: TrainSpec, name: str) -> tuple[float, float]:
    """Returns the factors of the learning rate and of the weight decay of a parameter, such as ``3.weight``.

    Raises SettingError when ``param_groups`` fails, or returns anything else than two numbers, 0 or more.
    """
    if spec.param_groups is None:
        return 1.0, 1.0
    try:
        index, _, own_name = name.partition(".")
        found = spec.param_groups(name, [*spec.layers][int(index)].get_parameter(own_name))
    except Exception as error:
        raise SettingError(f"param_groups failed for {name}: {typed_line(error)}") from error
    if isinstance(found, tuple | list) and len(found) == 2:
        lr_factor, decay_factor = found
        if all(isinstance(factor, int | float) and 0 <= factor < math.inf for factor in found):
            return float(lr_factor), float(decay_factor)
    raise SettingError(
        f"param_groups returned {' '.join(repr(found).split())[:100]} for {name}; return the factors of its learning "
        "rate and of its weight decay, two numbers, 0 or more"
    )


@lru_cache(maxsize=4)
def first_batch(source: str, seed: int, rows: int) -> tuple[Tensors, Tensors]:
    """Returns inputs and targets. Cached, because a plan needs them many times."""
    return SpecBatches(load_spec(source, seed), rows, seed).whole(0)


@lru_cache(maxsize=16)
def layer_errors(source: str, seed: int, rows: int, least: int) -> tuple[str, ...]:
    """Returns all faults. Cached, because a plan asks for every number of micro-batches that it tries. ``least`` are
    the rows of the smallest micro-batch."""
    spec = load_spec(source, seed)
    try:
        layers, loss = build(spec)
        inputs, targets = first_batch(source, seed, rows)
        SpecBatches(spec, rows, seed).check_prefetch()
        if spec.valid is not None:
            _ = SpecBatches(spec, rows, seed).held_out(1)[0]
        for index, layer in enumerate(layers):
            for name, parameter in layer.named_parameters():
                if parameter.requires_grad:
                    update_factors(spec, f"{index}.{name}")
        found = find_refusal(layers, loss, tuple(t[:least] for t in inputs), tuple(t[:least] for t in targets))
    except SuiteError as error:
        return (str(error),)
    except Exception as error:
        return (f"{source} does not describe a model that can be trained: {typed_line(error)}",)
    return (found,) if found else ()
