"""The layers, the loss and the parameter groups of a TrainSpec, as the engine takes them."""

from __future__ import annotations

import math

from torch import nn

from experiments.custom.batches import SpecBatches
from experiments.custom.layers import all_on_meta, tie_shared
from experiments.custom.loss import SummedLoss
from suite.errors import SettingError, first_line
from suite.train_spec import TrainSpec


def build(spec: TrainSpec) -> tuple[list[nn.Module], nn.Module]:
    """Returns the layers on the meta device, and the loss. Raises SettingError for layers that cannot be used."""
    layers = list(spec.layers)
    tie_shared(layers)
    _, targets = SpecBatches(spec, rows=1, seed=0).whole(0)
    return all_on_meta(layers), SummedLoss(spec, len(targets))


def update_factors(spec: TrainSpec, name: str, parameter: nn.Parameter) -> tuple[float, float]:
    """Returns the factors of the learning rate and of the weight decay of a parameter, such as ``3.weight``.

    Raises SettingError when ``param_groups`` fails, or returns anything else than two numbers, 0 or more.
    """
    if spec.param_groups is None:
        return 1.0, 1.0
    try:
        found = spec.param_groups(name, parameter)
    except Exception as error:
        raise SettingError(f"param_groups failed for {name}: {type(error).__name__}: {first_line(error)}") from error
    if isinstance(found, tuple | list) and len(found) == 2:
        lr_factor, decay_factor = found
        if all(isinstance(factor, int | float) and 0 <= factor < math.inf for factor in found):
            return float(lr_factor), float(decay_factor)
    raise SettingError(
        f"param_groups returned {' '.join(repr(found).split())[:100]} for {name}; return the factors of its learning "
        "rate and of its weight decay, two numbers, 0 or more"
    )
