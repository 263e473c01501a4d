"""What each layer keeps for its backward, counted on the meta device, where tensors have a size but no memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from suite.pipeline.layers import Tensors, as_tuple, structure_of


@dataclass(frozen=True)
class LayerBytes:
    """One layer and one micro-batch: number of parameters, bytes of its input, bytes kept for backward, the largest."""

    parameters: int
    boundary: int
    activations: int
    largest: int


def measured_layers(layers: Sequence[nn.Module], values: Tensors, loss: Callable[..., Any]) -> list[LayerBytes]:
    """Runs ``values`` through all layers and the loss, whose share counts to the last layer.

    Layers of the same structure, with the same inputs, are run once.
    """
    known: dict[Any, tuple[LayerBytes, Tensors]] = {}
    sizes = []
    for layer in layers:
        end = loss if layer is layers[-1] else None
        key = (structure_of(layer), _shapes(values), end is None)
        if key not in known:
            known[key] = _measure(layer, values, end)
        size, values = known[key]
        sizes.append(size)
    return sizes


def _measure(layer: nn.Module, values: Tensors, end: Callable[..., Any] | None) -> tuple[LayerBytes, Tensors]:
    """Runs one layer and adds up the distinct storages that autograd keeps for it, parameters left out."""
    kept: dict[int, int] = {}
    own = {_storage(parameter) for parameter in layer.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        if _storage(tensor) not in own:
            kept[_storage(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    given = tuple(value.detach().requires_grad_(value.is_floating_point()) for value in values)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), _FusedAttention():
        result = as_tuple(layer(*given))
        if end is not None:
            end(*result)
    size = LayerBytes(
        parameters=sum(parameter.numel() for parameter in layer.parameters()),
        boundary=sum(value.nbytes for value in given),
        activations=sum(kept.values()),
        largest=max(kept.values(), default=0),
    )
    return size, result


def _shapes(tensors: Any) -> tuple[Any, ...]:
    return tuple((tensor.shape, tensor.dtype) for tensor in tensors)


def _storage(tensor: Tensor) -> int:
    """A number that views of one storage have in common; meta tensors have no address to tell them apart by."""
    return int(tensor.untyped_storage()._cdata)


class _FusedAttention(TorchFunctionMode):
    """Has attention keep what the fused kernels keep: its three inputs and its result. On the meta device torch would
    take the plain formula, which keeps every score, in fp32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return _KeepFour.apply(*args[:3])  # type: ignore[no-untyped-call]
        return func(*args, **(kwargs or {}))


class _KeepFour(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mixed = torch.empty_like(query)
        ctx.save_for_backward(query, key, value, mixed)
        return mixed
