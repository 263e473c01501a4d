"""Tries a layer of your own on a few rows, to find what would fail in a worker, or give wrong gradients silently.

forward without graph   from a seed, in training mode: as F
forward with graph      from the same seed, and the buffers as they were: as R; must give the same bits
after other rows        the same bits again, if the layer remembers something
parameters              no forward changes them
evaluation              returns tensors of the same shapes: messages have those of training
backward                through it: no sparse gradients
on fake tensors         no value decides what is computed, because costs are counted on such tensors
"""

from __future__ import annotations

import io
import pickle
import random
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from suite.errors import typed_line
from suite.pipeline.model.changing_buffers import ChangingBuffers, Values, copies_of_buffers, replaced
from suite.pipeline.model.layer_copy import copied
from suite.pipeline.model.layers import Tensors, as_tuple
from suite.pipeline.model.rng import seeded

SEED = 1

GENERATORS = (torch.Generator, np.random.Generator, np.random.BitGenerator, np.random.RandomState, random.Random)
"""Types of generators that a layer may hold; nothing seeds them."""

KEEP_STATE = "keep state in buffers (each replica has its own); draw from default generators of torch, numpy or random"

Attributes = dict[str, tuple[type, bytes]]


def trial_error(layer: nn.Module, inputs: Tensors) -> str:
    """Returns what is wrong with a layer that takes ``inputs`` and has not run yet; empty if nothing is. Its buffers
    are as before."""
    try:
        return _trial_error(layer, inputs)
    except Exception as error:
        return f"runs once, and fails in another forward from the same state, as a recompute is ({typed_line(error)})"


def _trial_error(layer: nn.Module, inputs: Tensors) -> str:
    layer.train()
    fresh, attributes = copied(layer, torch.clone), attributes_of(layer)
    before: Values = []
    parameters = {name: parameter.detach().clone() for name, parameter in layer.named_parameters()}
    with torch.no_grad(), ChangingBuffers(layer).recorded(before):
        first = _forward(layer, inputs)
    complex_outputs = [str(output.dtype).removeprefix("torch.") for output in first if output.is_complex()]
    if complex_outputs:
        return f"returns {complex_outputs[0]}; tensors between layers must be real: return torch.view_as_real of it"
    leaves = tuple(tensor.detach().requires_grad_(tensor.is_floating_point()) for tensor in inputs)
    with replaced([(module, name, value.clone()) for module, name, value in before]), torch.enable_grad():
        second = _forward(layer, leaves)
    try:
        if len(first) != len(second) or not all(map(same_bits, first, second)):
            return (
                "returns other values for the same inputs and seeds, so a recompute would not repeat its forward: "
                + _cause_of_other_values(layer, inputs)
            )
        for name, parameter in layer.named_parameters():
            if not same_bits(parameter.detach(), parameters[name]):
                return f"changes its parameter {name} in a forward, and a recompute would change it again"
        if changes := changed_attributes(attributes, attributes_of(layer)):
            with torch.no_grad():
                with replaced(copies_of_buffers(fresh)):
                    _forward(fresh, _other_rows(inputs))
                if not all(map(same_bits, first, _forward(fresh, inputs))):
                    return f"{' and '.join(changes)}, and returns other values after other rows; {KEEP_STATE}"
        return _backward_error(layer, second) or _evaluation_error(layer, inputs, first)
    finally:
        for module, name, value in before:
            module._buffers[name] = value


def changed_attributes(before: Attributes, after: Attributes) -> list[str]:
    """Returns what a forward did to attributes, generators first; goes on after the layer's name."""
    changed = [(name, kind) for name, (kind, value) in after.items() if before.get(name) != (kind, value)]
    drawn = [f"draws from its own generator {name}" for name, kind in changed if issubclass(kind, GENERATORS)]
    return drawn + [f"changes its attribute {name}" for name, kind in changed if not issubclass(kind, GENERATORS)]


def attributes_of(layer: nn.Module) -> Attributes:
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
            values = value.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
            return tuple, ((str(value.dtype), tuple(value.shape), values),)
        return NotImplemented


def _cause_of_other_values(layer: nn.Module, inputs: Tensors) -> str:
    before = attributes_of(layer)
    with torch.no_grad():  # on other rows: what it remembers of these may be there already
        _forward(layer, _other_rows(inputs))
    changes = changed_attributes(before, attributes_of(layer))
    outside = "uses something outside that changes, such as a global variable, the clock or another generator"
    return f"it {' and '.join(changes) or outside}; {KEEP_STATE}"


def _other_rows(inputs: Tensors) -> Tensors:
    """Returns inputs in another order: of the rows or, if there is one, of its values."""
    return tuple(tensor.flip(0 if len(tensor) > 1 else -1) if tensor.dim() else tensor for tensor in inputs)


def _evaluation_error(layer: nn.Module, inputs: Tensors, in_training: Tensors) -> str:
    layer.eval()
    try:
        with torch.no_grad(), replaced(copies_of_buffers(layer)):
            outputs = _forward(layer, inputs)
    except Exception as error:
        return f"fails in evaluation mode: {typed_line(error)}"
    finally:
        layer.train()
    if (found := described(outputs)) != (wanted := described(in_training)):
        return f"returns {found} in evaluation mode and {wanted} in training; make them equal"
    return ""


def described(tensors: Tensors) -> str:
    """Returns the types and shapes of tensors, for people."""
    return ", ".join(f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}" for tensor in tensors)


def _forward(layer: nn.Module, inputs: Tensors) -> Tensors:
    with seeded(SEED, torch.device("cpu")):
        return as_tuple(layer(*inputs))


def same_bits(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one.nan_to_num(), other.nan_to_num())


def _backward_error(layer: nn.Module, outputs: Tensors) -> str:
    sums = [output.float().sum() for output in outputs if output.requires_grad]
    if not sums and any(map(torch.is_floating_point, outputs)) and any(p.requires_grad for p in layer.parameters()):
        return "returns nothing that depends on its parameters, so nothing trains them; leave detach and no_grad out"
    try:
        if sums:
            torch.autograd.backward(sums)
    except Exception as error:
        return f"has a backward that fails: {typed_line(error)}"
    gradients = {name: parameter.grad for name, parameter in layer.named_parameters()}
    for parameter in layer.parameters():
        parameter.grad = None
    sparse = [name for name, gradient in gradients.items() if gradient is not None and gradient.is_sparse]
    if sparse:
        return f"has sparse gradients of {sparse[0]}; build the embedding with sparse=False"
    return ""


def error_on_fakes(layer: nn.Module, inputs: Tensors) -> str:
    """Returns how a layer fails on tensors without values; empty if it does not."""
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
            _forward(layer, tuple(mode.from_tensor(tensor.detach()) for tensor in inputs))
    except Exception as error:
        return (
            "does not run on tensors without values, from which costs are estimated "
            f"({typed_line(error)}); what it computes must not depend on values: use "
            "torch.where"
        )
    return ""
