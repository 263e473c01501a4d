"""Layers, each run alone on what the layer before it returns, always from the same seed.

returned   by a forward without a graph                                       as F
again      by the same module, with its buffers as before, and with a graph   as R
fresh      by another copy, such as on other rows or in evaluation mode
"""

from __future__ import annotations

import io
import pickle
import random
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from suite.errors import SettingError
from suite.pipeline.model.changing_buffers import ChangingBuffers, Values, copies_of_buffers, replaced
from suite.pipeline.model.layer_copy import copied
from suite.pipeline.model.layers import ORIGINAL, Tensors, as_tuple, structure_key
from suite.pipeline.model.rng import seeded
from suite.pipeline.runtime.skip import Stash, pops_of, stashes_of

SEED = 1

CPU = torch.device("cpu")

GENERATORS = (torch.Generator, np.random.Generator, np.random.BitGenerator, np.random.RandomState, random.Random)
"""Types of generators that a layer may hold; nothing seeds them."""

ROUNDING = 1e-6
"""The share of the largest value by which values may differ that are the same but for rounding."""

KEEP_STATE = "keep state in buffers (each replica has its own); draw from default generators of torch, numpy or random"


class Trial:
    """A layer and its inputs. What several rules need is computed when the first one asks."""

    def __init__(self, layer: nn.Module, inputs: Tensors, taken: str = "its inputs") -> None:
        """``layer`` has its initial values, and stays as it is. ``taken`` describes the inputs for people."""
        layer.train()
        self.layer, self.inputs, self.taken = layer, inputs, taken
        self.versions = [tensor._version for tensor in inputs]
        self.kept = tuple(map(torch.clone, inputs))
        """The inputs as they were."""
        self.module = copied(layer, torch.clone)
        """The copy that runs twice."""
        self.parameters = dict(self.module.named_parameters())
        """Its parameters before it runs."""
        self._attributes = attributes_of(self.module)
        self._buffers: Values = []
        """Those that the first forward changed, with their values before."""
        self._leaves = tuple(tensor.detach().requires_grad_(tensor.is_floating_point()) for tensor in inputs)
        self.draws = False
        """Whether the first forward draws random numbers."""
        self.draws_backward = False

    @cached_property
    def returned(self) -> Any:
        """Raises what the layer raises, and RuntimeError for one that removes a buffer."""
        with torch.no_grad(), ChangingBuffers(self.module).recorded(self._buffers), seeded(SEED, CPU):
            states = generator_states()
            found = self.module(*self.inputs)
            self.draws = states != generator_states()
        return found

    @property
    def first(self) -> Tensors:
        """What the first forward returns, as a tuple."""
        return as_tuple(self.returned)

    @cached_property
    def again(self) -> Tensors:
        _ = self.returned
        with replaced([(module, name, value.clone()) for module, name, value in self._buffers]), torch.enable_grad():
            return _forward(self.module, self._leaves)

    def fresh(self, *several: Tensors, training: bool = True) -> Tensors:
        """Returns what a new copy returns for the last of several inputs, each with the buffers of the start."""
        module, outputs = copied(self.layer, torch.clone), self.inputs
        module.train(training)
        for inputs in several:
            with torch.no_grad(), replaced(copies_of_buffers(module)):
                outputs = _forward(module, inputs)
        return outputs

    @cached_property
    def gradients(self) -> dict[str, Tensor | None]:
        """The gradients of the sum of all outputs in the inputs (``input 0``) and in the parameters."""
        sums, states = [output.double().sum() for output in self.again if output.requires_grad], generator_states()
        if sums:
            torch.autograd.backward(sums)
        self.draws_backward = states != generator_states()
        inputs = ((f"input {number}", tensor) for number, tensor in enumerate(self._leaves))
        return {name: t.grad for name, t in (*inputs, *self.module.named_parameters()) if t.requires_grad}

    @cached_property
    def changed_buffers(self) -> list[str]:
        """The buffers that the first forward changes."""
        _ = self.returned
        before = dict(self.layer.named_buffers())
        return [
            name for name, now in self.module.named_buffers() if name in before and not same_bits(now, before[name])
        ]

    @cached_property
    def changed_attributes(self) -> list[str]:
        """What the two forwards do to attributes, generators first; goes on after the layer's name."""
        _ = self.again
        after = attributes_of(self.module)
        changed = [(name, kind) for name, (kind, value) in after.items() if self._attributes.get(name) != (kind, value)]
        drawn = [f"draws from its own generator {name}" for name, kind in changed if issubclass(kind, GENERATORS)]
        return drawn + [f"changes its attribute {name}" for name, kind in changed if not issubclass(kind, GENERATORS)]


def _forward(module: nn.Module, inputs: Tensors) -> Tensors:
    with seeded(SEED, CPU):
        return as_tuple(module(*inputs))


def generator_states() -> bytes:
    """Returns the states of the default generators of torch, random and numpy."""
    return pickle.dumps((torch.get_rng_state().numpy(), random.getstate(), np.random.get_state()))


def attributes_of(layer: nn.Module) -> dict[str, tuple[type, bytes]]:
    """Returns the type and the pickled value of everything that a layer and its modules hold beside parameters, buffers
    and modules."""
    found = {}
    for prefix, module in layer.named_modules():
        for name, value in vars(module).items():
            if name not in vars(nn.Module()) and name != "reset_parameters":
                file = io.BytesIO()
                with suppress(Exception):  # what cannot be pickled is not compared
                    _Pickler(file).dump(value)
                    found[f"{prefix}.{name}".lstrip(".")] = type(value), file.getvalue()
    return found


class _Pickler(pickle.Pickler):
    """Pickles equal tensors and generators to equal bytes, which they themselves do not."""

    def reducer_override(self, value: object) -> Any:
        if isinstance(value, torch.Generator):
            value = value.get_state()
        if isinstance(value, Tensor):
            return tuple, ((str(value.dtype), tuple(value.shape), bytes_of(value)),)
        return NotImplemented


def bytes_of(tensor: Tensor) -> bytes:
    return tensor.detach().to_dense().reshape(-1).view(torch.uint8).numpy().tobytes()


def same_bits(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one.nan_to_num(), other.nan_to_num())


def equal(some: Tensors, others: Tensors) -> bool:
    """Whether tensors are equal up to rounding."""
    return len(some) == len(others) and all(map(_equal_tensors, some, others))


def _equal_tensors(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or not (one.numel() and one.is_floating_point()):
        return same_bits(one, other)
    one, other = one.detach().double(), other.detach().double()
    largest = float(one.abs().nan_to_num().max())
    return torch.allclose(one, other, ROUNDING, ROUNDING * largest, equal_nan=True)


def described(tensors: Tensors) -> str:
    """Returns the types and shapes of tensors, for people."""
    return ", ".join(f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}" for tensor in tensors)


def trials(
    layers: Sequence[nn.Module], inputs: Tensors, with_values: Callable[[nn.Module], nn.Module]
) -> Iterator[tuple[int, Trial | int]]:
    """Yields the index of each layer and a trial of it, or the index of an equal layer before it, whose outputs stand
    for its own. ``layers`` are on the meta device; ``with_values`` makes a copy that can run.

    Raises SettingError as ``with_values`` does, with the layer's name.
    """
    stash: Stash = {}
    known: dict[Hashable, tuple[int, Tensors]] = {}
    tensors, before = inputs, "the inputs"
    for index, layer in enumerate(layers):
        popped = {skip: stash.pop(skip) for skip in pops_of(layer)}
        taken = f"{before}, {described(tensors)}"
        if popped:
            taken += f", then the popped {', '.join(popped)}, {described(tuple(popped.values()))}"
        key = (structure_key(layer), _buffer_values(layer), described(tensors))
        name = name_of(index, layer)
        if key in known:
            equal, tensors = known[key]
            yield index, equal
        else:
            try:
                trial = Trial(with_values(layer), (*tensors, *popped.values()), taken)
            except SettingError as fault:
                raise SettingError(f"{name}: {fault}") from None
            yield index, trial
            tensors = trial.first
            if not pops_of(layer) and not stashes_of(layer):
                known[key] = index, tensors
        before = f"what {name} returns"
        if names := stashes_of(layer):
            stash.update(zip(names, tensors[-len(names) :], strict=True))
            tensors = tensors[: -len(names)]


def name_of(index: int, layer: nn.Module) -> str:
    """Returns the name of a layer in messages."""
    return f"layer {index} ({type(layer).__name__})"


def _buffer_values(layer: nn.Module) -> Hashable:
    """Returns the values of a user's buffers, which may decide what the layer computes."""
    original = vars(layer).get(ORIGINAL)
    buffers = [] if original is None else original.layer.buffers()
    return tuple(hash(bytes_of(buffer)) for buffer in buffers)
