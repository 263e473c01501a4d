"""Layers of your own as the engine needs them: on the meta device, with a way to get their values on one stage."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from experiments.custom.layer_trial import SEED, described, error_on_fakes, same_bits, trial_error
from suite.device import one_thread
from suite.errors import SettingError, typed_line
from suite.pipeline.model.batchnorm import by_micro_batch
from suite.pipeline.model.layer_copy import copied, held
from suite.pipeline.model.layers import (
    ORIGINAL,
    Tensors,
    materialize,
    reset_all,
    structure_key,
    ties_of,
    without_values,
)
from suite.pipeline.model.rng import seeded
from suite.pipeline.runtime.skip import Stash, call, pops_of, stashes_of

CPU = torch.device("cpu")


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
    tensors = [*layer.parameters(), *layer.buffers()]
    count = sum(tensor.is_meta for tensor in tensors)
    if count or any(isinstance(value, Tensor) and value.is_meta for _, value in held(layer)):
        if count < len(tensors):
            raise SettingError(f"{type(layer).__name__} has {count} of {len(tensors)} tensors on the meta device")
        return layer
    try:
        return without_values(layer, memo)
    except Exception as error:
        raise SettingError(f"a {type(layer).__name__} cannot be copied ({typed_line(error)})") from error


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


def find_layer_errors(layers: Sequence[nn.Module], loss: nn.Module, inputs: Tensors, targets: Tensors) -> list[str]:
    """Runs a few rows through all layers, built by ``on_meta``, and the loss; returns what a run would stumble over.

    So a user reads of a wrong layer before any worker starts. Of equal layers without skips only the first runs, and
    stands for the others with its outputs.
    """
    shared = _shared_buffers(layers)
    stash: Stash = {}
    meta_stash: Stash = {}
    tried: dict[Hashable, Tensors] = {}
    tensors, before = inputs, "the inputs"
    for index, layer in enumerate(layers):
        name = f"layer {index} ({type(layer).__name__})"
        key = None if pops_of(layer) or stashes_of(layer) else (structure_key(layer), described(tensors))
        if key in tried:
            tensors, before = tried[key], f"what {name} returns"
            continue
        popped = {skip: stash[skip] for skip in pops_of(layer) if skip in stash}
        taken = f"{before}, {described(tensors)}"
        if popped:
            taken += f", then the popped {', '.join(popped)}, {described(tuple(popped.values()))}"
        taken_tensors = (*tensors, *popped.values())
        versions = [tensor._version for tensor in taken_tensors]
        try:
            real, unused = (by_micro_batch(_initialised(layer)) for _ in range(2))  # a first forward may differ
            if wrong := _parameter_error(real):
                return [f"{name} {wrong}"]
        except SettingError as fault:
            return [f"{name}: {fault}"]
        check = real.register_forward_hook(_check_output)
        try:
            with torch.no_grad():
                outputs = call(real, tensors, stash)
        except _OutputError as fault:
            stashes = f", then what it stashes: {', '.join(stashes_of(layer))}" if stashes_of(layer) else ""
            return [f"{name} returns {fault}; it must return one tensor or a tuple of tensors{stashes}"]
        except Exception as error:
            return [f"{name} cannot take {taken}: {typed_line(error)}"]
        if [tensor._version for tensor in taken_tensors] != versions:
            return [
                f"{name} changes its inputs in place, and a recompute would start from changed ones; use the operation "
                "that returns a new tensor (for modules of torch inplace=False)"
            ]
        check.remove()
        if parted := [buffer for buffer in _changed_buffers(layer, real) if f"{index}.{buffer}" in shared]:
            return [f"{name} changes its buffer {parted[0]}, which another layer has too; give each its own"]
        failure = trial_error(unused, taken_tensors)
        if failure:  # again, because sums of several threads may be in another order on a busy machine
            with one_thread():
                failure = trial_error(by_micro_batch(_initialised(layer)), taken_tensors)
        on_meta_too = _failure_on_meta(layer, tensors, outputs, meta_stash)  # also fills the stash
        failure = failure or on_meta_too or error_on_fakes(unused, taken_tensors)
        if failure:
            return [f"{name} {failure}"]
        tensors, before = outputs, f"what {name} returns"
        if key is not None:
            tried[key] = outputs
    return _loss_errors(loss, tensors, targets)


def _shared_buffers(layers: Sequence[nn.Module]) -> set[str]:
    """Returns the buffers that several layers have, such as ``0.running_mean``."""
    owners: dict[int, list[str]] = {}
    for index, layer in enumerate(layers):
        original = vars(layer).get(ORIGINAL)
        for name, buffer in (layer if original is None else original.layer).named_buffers():
            owners.setdefault(id(buffer), []).append(f"{index}.{name}")
    return {name for names in owners.values() if len(names) > 1 for name in names}


def _changed_buffers(layer: nn.Module, real: nn.Module) -> Iterator[str]:
    """Yields the buffers of a layer that its forward has changed, or changes once a step (BatchNorm)."""
    before = dict(_initialised(layer).named_buffers())
    norms = {f"{name}." for name, module in real.named_modules() if isinstance(module, nn.BatchNorm2d)}
    for name, buffer in real.named_buffers():
        if not same_bits(buffer, before[name]) or f"{name.rpartition('.')[0]}." in norms:
            yield name


def _initialised(layer: nn.Module) -> nn.Module:
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


def _parameter_error(layer: nn.Module) -> str:
    for name, parameter in layer.named_parameters():
        if parameter.requires_grad and parameter.dtype in (torch.float16, torch.bfloat16):
            return (
                f"trains {name} in {str(parameter.dtype).removeprefix('torch.')}, where most updates round to nothing; "
                "convert the layer with .float() and set optimizer.precision=bf16"
            )
        if parameter.is_complex():
            return f"has the complex parameter {name}; keep its real and imaginary parts (torch.view_as_real)"
        if parameter.dim() == 0:
            return f"has the parameter {name} without an axis; use torch.ones(1) instead of torch.tensor(1.0)"
    return ""


class _OutputError(Exception):
    """A layer returned something else than tensors; the message says what."""


def _check_output(layer: nn.Module, inputs: Tensors, returned: object) -> None:
    """A forward hook. Raises _OutputError unless a layer returns one tensor or a tuple of them, its stashes last."""
    outputs = (returned,) if isinstance(returned, Tensor) else returned
    if not isinstance(outputs, tuple | list):
        raise _OutputError("nothing" if returned is None else f"a {type(returned).__name__}")
    for output in outputs:
        if not isinstance(output, Tensor):
            raise _OutputError(f"a {type(output).__name__} among its outputs")
        if output.layout != torch.strided:
            raise _OutputError("a sparse tensor among its outputs, not a dense one")
    if len(outputs) <= len(stashes_of(layer)):
        raise _OutputError("one tensor" if len(outputs) == 1 else f"{len(outputs)} tensors")


def _failure_on_meta(layer: nn.Module, inputs: Tensors, outputs: Tensors, stash: Stash) -> str:
    """Returns how the layer fails on the meta device, where the shapes of messages are found; empty if it runs."""
    try:
        with torch.no_grad():
            found = call(layer, tuple(tensor.to("meta") for tensor in inputs), stash, bf16=False)
    except Exception as error:
        return (
            f"does not run on the meta device, where shapes are found without values ({typed_line(error)}); shapes "
            "must not depend on values, and every tensor that a layer holds must be a parameter or a buffer"
        )
    if described(found) != described(outputs):
        return (
            f"returns {described(outputs)}, and {described(found)} on the meta device; shapes must not depend on values"
        )
    return ""


def _loss_errors(loss: nn.Module, outputs: Tensors, targets: Tensors) -> list[str]:
    leaves = tuple(tensor.detach().requires_grad_(tensor.is_floating_point()) for tensor in outputs)
    try:
        objective, _ = loss(*leaves, *targets)
    except SettingError as fault:
        return [str(fault)]
    except Exception as error:
        return [f"the loss cannot take {described(outputs)} with targets {described(targets)}: {typed_line(error)}"]
    if objective.dim():
        return [f"the loss returns a tensor of shape {tuple(objective.shape)}; it must be one number, a mean over rows"]
    if not objective.requires_grad:
        return ["the loss has no gradient; it must be differentiable in the last layer's outputs"]
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            loss(*(mode.from_tensor(tensor.detach()) for tensor in (*outputs, *targets)))
    except Exception as error:
        return [
            f"the loss does not run on tensors without values, from which costs are estimated ({typed_line(error)}); "
            "shapes must not depend on values: use torch.where instead of a mask as an index"
        ]
    return []
