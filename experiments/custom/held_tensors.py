"""What layers of your own may hold: a pipeline trains copies of them, each stage its own.

one Parameter in several layers             tied
one module in several layers                its parameters are tied
one buffer in several layers                if no forward changes it
a hook on a parameter                       if it is linear: it gets the gradients of each micro-batch
what a layer reaches, but did not register  if nothing trains it, and no other layer registers it
what a function has captured                no: a copy would still use the original
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from suite.errors import SettingError, typed_line
from suite.pipeline.model.layer_copy import captured, held


def check_held(layers: Sequence[nn.Module]) -> None:
    """Raises SettingError for what copies of the layers would part or lose."""
    owners = {id(value): index for index, layer in reversed([*enumerate(layers)]) for value in _registered(layer)}
    for index, layer in enumerate(layers):
        name = f"layer {index} ({type(layer).__name__})"
        for fault in (*_unregistered(layer, index, owners), *_captured(layer), *_hooks(layer)):
            raise SettingError(f"{name} {fault}")
    _check_memory(layers)


def _registered(layer: nn.Module) -> Iterator[Tensor | nn.Module]:
    yield from layer.modules()
    yield from layer.parameters()
    yield from layer.buffers()


def _unregistered(layer: nn.Module, index: int, owners: dict[int, int]) -> Iterator[str]:
    own = set(map(id, _registered(layer)))
    for path, value in held(layer):
        if id(value) in own:
            continue
        is_trained = any(map(_is_trained, value.parameters() if isinstance(value, nn.Module) else (value,)))
        owner = owners.get(id(value), index)
        if is_trained or owner != index:
            what = f"the {type(value).__name__} of layer {owner}" if owner != index else f"a {type(value).__name__}"
            yield (
                f"holds {what} in {path} without registering it, so its stage would not train it; assign it to an "
                "attribute of its own, without a list, dict or object around it"
            )


def _is_trained(tensor: Tensor) -> bool:
    return tensor.requires_grad and tensor.is_leaf


def _captured(layer: nn.Module) -> Iterator[str]:
    for path, value in captured(layer):
        yield (
            f"uses a {type(value).__name__} by {path}, which stays the original when the layer is copied to its stage; "
            "use self in a method, or the module that a hook gets"
        )


def _hooks(layer: nn.Module) -> Iterator[str]:
    for name, parameter in layer.named_parameters():
        if getattr(parameter, "_post_accumulate_grad_hooks", None):
            yield (
                f"has a hook on {name} after its gradient is accumulated, which would run for each micro-batch; "
                "use register_hook, or param_groups"
            )
        for hook in (parameter._backward_hooks or {}).values():
            if fault := _fault_of_hook(hook, parameter):
                yield f"has a hook on {name} that {fault}"


def _fault_of_hook(hook: object, parameter: Tensor) -> str:
    """Returns what is wrong with a hook on a gradient: it gets that of a micro-batch, and must be linear in it."""

    def hooked(gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        returned = hook(gradient)  # type: ignore[operator]
        return gradient if returned is None else returned

    generator = torch.Generator().manual_seed(1)
    shape, dtype = parameter.shape, parameter.dtype
    one, other = (torch.randn(shape, generator=generator, dtype=dtype) for _ in range(2))
    try:
        sums = hooked(one) + hooked(other), hooked(one + other)
        scaled = 3 * hooked(one), hooked(3 * one)
    except Exception as error:
        return f"fails: {typed_line(error)}"
    if all(torch.allclose(*pair, rtol=1e-4, atol=1e-5) for pair in (sums, scaled)):
        return ""
    return (
        "is not linear in the gradient, and a pipeline calls it with the gradient of each micro-batch; "
        "use optimizer.max_grad_norm to clip"
    )


def _check_memory(layers: Sequence[nn.Module]) -> None:
    """Raises SettingError for two tensors over one memory, one of them a parameter."""
    places = []
    for index, layer in enumerate(layers):
        for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
            if tensor.numel() and not tensor.is_meta and tensor.layout == torch.strided:
                begin = tensor.data_ptr()
                spread = sum((size - 1) * abs(step) for size, step in zip(tensor.shape, tensor.stride(), strict=True))
                places.append((begin, begin + (spread + 1) * tensor.element_size(), index, name, tensor))
    places.sort(key=lambda place: place[:4])
    last: tuple[int, int, int, str, Tensor] | None = None
    for place in places:
        both = [last, place] if last is not None and place[0] < last[1] and place[4] is not last[4] else []
        if any(isinstance(tensor, nn.Parameter) for *_, tensor in both):
            names = " and ".join(f"{name} of layer {index}" for _, _, index, name, _ in both)
            raise SettingError(
                f"{names} are two tensors over one memory, and would part on their stages; use one Parameter for "
                "both, such as head.weight = table.weight, or .clone()"
            )
        if last is None or place[1] > last[1]:
            last = place
