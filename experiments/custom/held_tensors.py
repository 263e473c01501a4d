"""What layers of your own may hold: each stage trains copies of its layers.

one Parameter in several layers       tied
one module in several layers          its parameters are tied
one buffer in several layers          if no forward changes it (``layer_check``)
a hook on a parameter                 if it is linear: it gets the gradients of each micro-batch
a tensor or module in a list, dict    if nothing trains it and no layer registers it
or object, or captured by a function
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from suite.errors import SettingError, typed_line
from suite.pipeline.model.layer_copy import captured, held
from suite.train_spec import TrainSpec

SCALES = (1e-4, 1.0, 1e4)
"""The scales of gradients that a hook is tried with: a bound shows at one of them."""


def check_held(spec: TrainSpec) -> None:
    """Raises SettingError for what copies of the layers would part or lose."""
    layers = list(spec.layers)
    owners = {id(value): index for index, layer in reversed([*enumerate(layers)]) for value in _registered(layer)}
    for index, layer in enumerate(layers):
        try:
            faults = [*_unregistered(layer, index, owners), *_captured(layer, owners), *_hooks(layer)]
        except SettingError as fault:
            faults = [f"cannot be copied: {fault}"]
        if faults:
            raise SettingError(f"layer {index} ({type(layer).__name__}) {faults[0]}")
    for name in ("loss", "metric", "units", "param_groups"):
        for path, value in captured(getattr(spec, name)):
            if id(value) in owners:
                raise SettingError(
                    f"{name} uses the {type(value).__name__} of layer {owners[id(value)]} by {path}, which another "
                    "stage may have; let the layer return what is needed"
                )
    _check_memory(layers)


def _registered(layer: nn.Module) -> tuple[Tensor | nn.Module, ...]:
    return (*layer.modules(), *layer.parameters(), *layer.buffers())


def _unregistered(layer: nn.Module, index: int, owners: dict[int, int]) -> Iterator[str]:
    own = set(map(id, _registered(layer)))
    is_recomputed = any(module._forward_pre_hooks for module in layer.modules())  # as weight_norm and prune do
    for path, value in held(layer):
        if isinstance(value, Tensor) and value.grad_fn is not None and not is_recomputed:
            yield f"holds in {path} a tensor that was computed from parameters; compute it in the forward"
        owner = owners.get(id(value), index)
        if id(value) not in own and (owner != index or _is_trained(value)):
            what = f"the {type(value).__name__} of layer {owner}" if owner != index else f"a {type(value).__name__}"
            yield (
                f"holds {what} in {path} without registering it, so its stage would have another one; assign it to an "
                "attribute of its own, without a list, dict or object around it"
            )


def _captured(layer: nn.Module, owners: dict[int, int]) -> Iterator[str]:
    for path, value in captured(layer):
        if id(value) in owners or _is_trained(value):
            yield (
                f"uses a {type(value).__name__} by {path}, which stays the original when the layer is copied to its "
                "stage; make it an attribute of the layer, and use it in a method, or by the module that a hook gets"
            )


def _is_trained(value: Tensor | nn.Module) -> bool:
    tensors = value.parameters() if isinstance(value, nn.Module) else (value,)
    return any(tensor.requires_grad and tensor.is_leaf for tensor in tensors)


def _hooks(layer: nn.Module) -> Iterator[str]:
    for name, parameter in layer.named_parameters():
        if getattr(parameter, "_post_accumulate_grad_hooks", None):
            yield (
                f"has a hook on {name} after its gradient is accumulated, which would run for each micro-batch; "
                "use register_hook, or param_groups"
            )
        for hook in (parameter._backward_hooks or {}).values() if parameter.requires_grad else ():
            if fault := _fault_of_hook(hook, parameter):
                yield f"has a hook on {name} that {fault}"


def _fault_of_hook(hook: Callable[[Tensor], Tensor | None], parameter: Tensor) -> str:
    """Returns what is wrong with a hook on a gradient: it gets that of a micro-batch, and must be linear in it."""

    def hooked(gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        returned = hook(gradient)
        return gradient if returned is None else returned

    device = parameter.device if not parameter.is_meta else torch.device("cpu")
    generator = torch.Generator(device).manual_seed(1)
    try:
        for scale in SCALES:
            one, other = (
                scale * torch.randn(parameter.shape, generator=generator, device=device).to(parameter.dtype)
                for _ in range(2)
            )
            whole, parts = hooked(one + other), hooked(one) + hooked(other)
            if not torch.allclose(whole, parts, rtol=0, atol=1e-3 * float(parts.abs().max().clamp(min=0.1 * scale))):
                return (
                    "is not linear in the gradient, and a pipeline calls it with the gradient of each micro-batch; "
                    "use optimizer.max_grad_norm to clip"
                )
    except Exception as error:
        return f"fails: {typed_line(error)}"
    return ""


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
