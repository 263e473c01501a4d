"""Layers of your own as the engine needs them: on the meta device, with a way to get their values on one stage."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from experiments.custom.trial import CPU, SEED, same_bits
from suite.errors import SettingError, typed_line
from suite.pipeline.model.layer_copy import copied, held
from suite.pipeline.model.layers import ORIGINAL, materialize, reset_all, ties_of, without_values
from suite.pipeline.model.rng import seeded


def all_on_meta(layers: Sequence[nn.Module]) -> list[nn.Module]:
    """Returns all layers as ``on_meta`` does, and raises as it does.

    What several layers hold, such as a configuration, is copied once: equal layers then remain equal, and one is
    measured for all.
    """
    owners: dict[int, set[int]] = {}
    for index, layer in enumerate(layers):
        for value in (value for module in layer.modules() for value in vars(module).values()):
            if type(value).__module__ != "builtins" and not isinstance(value, Tensor | nn.Module):
                owners.setdefault(id(value), set()).add(index)
    shared = {key for key, indices in owners.items() if len(indices) > 1}
    copies: dict[int, object] = {}
    made = []
    for index, layer in enumerate(layers):
        memo = dict(copies)
        try:
            made.append(on_meta(layer, memo))
        except SettingError as fault:
            raise SettingError(f"layer {index}: {fault}") from None
        copies |= {key: memo[key] for key in shared & memo.keys()}
    return made


def on_meta(layer: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """Returns the layer on the meta device; ``materialize`` copies the layer itself. One that was built on the meta
    device is returned as it is.

    ``memo`` is that of ``copy.deepcopy``. Raises SettingError for a layer with parameters on two devices, or one that
    cannot be copied.
    """
    registered = [tensor.is_meta for tensor in (*layer.parameters(), *layer.buffers())]
    on_meta = [path for path, value in held(layer) if isinstance(value, Tensor) and value.is_meta]
    if on_meta and not all(registered):
        raise SettingError(f"its {on_meta[0]} is on the meta device, and others of its tensors are not; give it values")
    if on_meta:
        return layer
    try:
        bare = without_values(layer, memo)
    except Exception as error:
        raise SettingError(
            f"a {type(layer).__name__} cannot be copied ({typed_line(error)}); keep files, locks and the like out of it"
        ) from error
    own = set(map(id, layer.modules()))
    for path, value in held(bare):
        if id(value) in own or (isinstance(value, Tensor) and not value.is_meta):
            raise SettingError(
                f"a copy of the {type(layer).__name__} does not get its own {path} by copy.deepcopy; use no weak "
                "reference to a module, and pass the memo on in a __deepcopy__"
            )
    return bare


def tie_shared(layers: Sequence[nn.Module]) -> None:
    """Ties parameters that are one object in several layers, such as an embedding that is also the output projection.

    Raises SettingError for one that is shared inside a layer: its copies on a stage would part.
    """
    places: dict[int, list[tuple[int, str]]] = {}
    for index, layer in enumerate(layers):
        for name, parameter in layer.named_parameters(remove_duplicate=False):
            places.setdefault(id(parameter), []).append((index, name))
    for shared in places.values():
        indices = {index for index, _ in shared}
        if len(indices) < len(shared):
            names = ", ".join(f"{name} of layer {index}" for index, name in shared)
            raise SettingError(f"one parameter has several names in a layer ({names}); give each layer its name once")
        if len(indices) > 1:
            tie = "{1} of layer {0}".format(*shared[0])
            for index, name in shared:
                layers[index].gpipe_ties = {**ties_of(layers[index]), name: tie}  # type: ignore[assignment]


def initialised(layer: nn.Module) -> nn.Module:
    """Returns the layer with its values. Raises SettingError naming a tensor that nothing initialises."""
    if ORIGINAL in vars(layer):
        real = materialize(layer, SEED, CPU)
        for name, tensor in (*real.named_parameters(), *real.named_buffers()):
            if tensor.is_floating_point() and tensor.numel() and tensor.isnan().all():
                raise SettingError(f"its {name} is not a number; it must be built with values")
        return real
    ones, zeros = (copied(layer, partial(_filled, value)) for value in (1, 0))
    for real in (ones, zeros):
        with seeded(SEED, CPU), torch.no_grad():
            reset_all(real)
    for (path, one), (_, zero) in zip(held(ones), held(zeros), strict=True):
        if isinstance(one, Tensor) and isinstance(zero, Tensor) and not same_bits(one, zero):
            raise SettingError(
                f"its {path.lstrip('.')} has no values: a layer on the meta device needs a reset_parameters that "
                "initialises all its parameters and buffers; or build it with values"
            )
    return ones


def _filled(value: float, tensor: Tensor) -> Tensor:
    return torch.full_like(tensor, value, device=CPU) if tensor.is_meta else tensor.clone()
