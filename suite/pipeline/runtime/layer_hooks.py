"""Watches the tensors of layers while they train, by hooks of torch.

    inputs --layer--> outputs           each output, as soon as it is there
    gradients <--layer-- gradients      the gradient of each input by this layer alone, and of each parameter

That changes no value, but for the order of sums in bf16 on GPUs: there a product adds to a gradient only where nothing
watches it. A layer that works in place on its input shows no gradient of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from suite.pipeline.model.layers import as_tuple


@dataclass(frozen=True)
class Place:
    """Where a tensor is in a model."""

    layer: int
    what: str
    """Such as "output 0", "gradient of weight", "loss 0", or "loss of parts 0" where ``gpipe_score`` computes it, in
    parts whose number depends on the memory."""

    @property
    def is_backward(self) -> bool:
        return self.what.startswith("gradient")


Watch = Callable[[Place, Tensor], None]


@contextmanager
def watch_tensors(layers: Mapping[int, nn.Module], loss: nn.Module | None, watch: Watch) -> Iterator[None]:
    """A context in which ``watch`` sees the floating-point tensors of layers, given by their indices in the model, and
    those of the loss behind the last one."""
    with ExitStack() as hooks:
        for index, layer in layers.items():
            hooked = partial(_with_hooks, index, watch)
            hooks.enter_context(layer.register_forward_pre_hook(hooked, prepend=True))
            if loss is not None and index == max(layers) and hasattr(layer, "gpipe_score"):
                hooks.callback(_hook_score(layer, partial(hooked, layer), _on_outputs(index, "loss of parts", watch)))
            hooks.enter_context(layer.register_forward_hook(_on_outputs(index, "output", watch)))
            for part, parameter in layer.named_parameters():
                if parameter.requires_grad:  # a frozen one gets no gradient
                    on_gradient = _on_gradient(Place(index, f"gradient of {part}"), watch)
                    hooks.enter_context(parameter.register_hook(on_gradient))
        last, layer = list(layers.items())[-1]
        if loss is not None and not hasattr(layer, "gpipe_score"):
            hooks.enter_context(loss.register_forward_hook(_on_outputs(last, "loss", watch)))
        yield


def _with_hooks(index: int, watch: Watch, layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns a layer's inputs, those with a gradient as views with a hook: a tensor that is also a skip has another
    gradient from there."""
    views = list(inputs)
    for number, tensor in enumerate(inputs):
        if isinstance(tensor, Tensor) and tensor.requires_grad and torch.is_grad_enabled():
            views[number] = tensor.view_as(tensor)
            views[number].register_hook(_on_gradient(Place(index, f"gradient of input {number}"), watch))
    return tuple(views)


def _hook_score(
    layer: nn.Module,
    hooked: Callable[[tuple[Any, ...]], tuple[Any, ...]],
    on_outputs: Callable[[nn.Module, Any, Any], None],
) -> Callable[[], object]:
    """Passes a last layer's ``gpipe_score``, which replaces its ``forward``, inputs with hooks, and its results on;
    returns how to undo it."""
    score = cast(Callable[..., Any], layer.gpipe_score)

    def hooked_score(loss: nn.Module, inputs: tuple[Any, ...], targets: tuple[Any, ...]) -> Any:
        results = score(loss, hooked(inputs), targets)
        on_outputs(layer, inputs, results)
        return results

    layer.__dict__["gpipe_score"] = hooked_score
    return lambda: layer.__dict__.pop("gpipe_score")


def _on_gradient(place: Place, watch: Watch) -> Callable[[Tensor | None], None]:
    def hook(gradient: Tensor | None) -> None:
        if gradient is not None:  # autograd passes None for a deferred one
            watch(place, gradient.detach())

    return hook


def _on_outputs(index: int, what: str, watch: Watch) -> Callable[[nn.Module, Any, Any], None]:
    def hook(module: nn.Module, inputs: Any, outputs: Any) -> None:
        for number, tensor in enumerate(as_tuple(outputs)):
            if tensor.is_floating_point():
                watch(Place(index, f"{what} {number}"), tensor.detach())

    return hook
