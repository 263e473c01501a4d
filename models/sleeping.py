"""A layer that takes time and computes next to nothing: stands in for a real one whose time is known.

With it a pipeline of any depth runs on a few cores, because sleeping stages do not compete for them; the messages, the
schedule and the processes stay real.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class Sleeping(nn.Module):
    """Sleeps ``forward_s`` in each forward, a rebuild included, and ``backward_s`` in each backward; half of that, the
    part of the weights, can be put off as a matrix product's can."""

    def __init__(self, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.forward_s, self.backward_s = forward_s, backward_s
        self.weight = nn.Parameter(torch.ones(1))
        self.later: list[Callable[[], None]] | None = None
        """As ``suite.pipeline.put_off`` has it."""

    def forward(self, x: Tensor) -> Tensor:
        """Returns ``weight * x``, of any shape. On the meta device, asked for shapes alone, it does not sleep."""
        result: Tensor = _Sleep.apply(x, self.weight, self)  # type: ignore[no-untyped-call]
        return result

    def sleep_for_weights(self) -> None:
        """Sleeps the part that can be put off; the gradient is zero."""
        time.sleep(self.backward_s / 2)
        if self.weight.grad is None:
            self.weight.grad = torch.zeros_like(self.weight)

    def reset_parameters(self) -> None:
        """The weight is one: what goes in comes out."""
        nn.init.ones_(self.weight)


class SplitSleeping(nn.Module):
    """Sleeps ``forward_s`` in each forward, ``input_s`` for the input's gradient and ``weight_s`` for the weights'.

    The two gradients are nodes of their own in autograd's graph, so a schedule that asks for one of them waits for that
    one alone, and that of the weights can be put off. Unlike ``Sleeping`` it has true gradients, which tell a wrong
    pipeline from a right one, and as many ``parameters`` as shall be exchanged between replicas.
    """

    def __init__(self, forward_s: float, input_s: float, weight_s: float, parameters: int = 1) -> None:
        super().__init__()
        self.forward_s, self.input_s, self.weight_s = forward_s, input_s, weight_s
        self.weight = nn.Parameter(torch.empty(parameters))
        self.later: list[Callable[[], None]] | None = None
        """As ``suite.pipeline.put_off`` has it."""
        if not self.weight.is_meta:
            self.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """Returns ``mean(weight) * x``, of any shape. On the meta device, asked for shapes alone, it does not sleep."""
        if not x.is_meta:
            _sleep(self.forward_s)
        if torch.is_grad_enabled() and not x.requires_grad:
            x = x.detach().requires_grad_()  # the first stage is to take as long as the others
        way_of_x: Tensor = _SleepBack.apply(x, self.input_s)  # type: ignore[no-untyped-call]
        way_of_weight: Tensor = _SleepForWeight.apply(self.weight, self)  # type: ignore[no-untyped-call]
        return way_of_x * way_of_weight.mean()

    def add_for_weight(self, gradient: Tensor) -> None:
        """Sleeps the weights' part and adds their gradient."""
        _sleep(self.weight_s)
        self.weight.grad = gradient if self.weight.grad is None else self.weight.grad + gradient

    def reset_parameters(self) -> None:
        """Near one, and no two layers alike: what goes in comes out about as large."""
        nn.init.uniform_(self.weight, 0.9, 1.1)
        with torch.no_grad():  # the mean of many would be one in every layer
            self.weight.add_(torch.empty(1).uniform_(-0.1, 0.1).to(self.weight.device))


class SquareLoss(nn.Module):
    """The sum of squares of what leaves the last layer: any loss will do where nothing is learned."""

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """x of any shape -> (objective, measure), both that sum; ``target`` is not read."""
        objective = x.square().sum()
        return objective, objective.detach()


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: Sleeping) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.layer = layer
        if not x.is_meta:
            time.sleep(layer.forward_s)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
        (weight,), layer = ctx.saved_tensors, ctx.layer
        if not ctx.needs_input_grad[1]:  # the weight is frozen
            time.sleep(layer.backward_s / 2)
            return gradient * weight, None, None
        if layer.later is not None:
            time.sleep(layer.backward_s / 2)
            layer.later.append(layer.sleep_for_weights)
            return gradient * weight, None, None
        time.sleep(layer.backward_s)
        return gradient * weight, torch.zeros_like(weight), None


class _SleepBack(torch.autograd.Function):
    """The identity, whose backward sleeps."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        _sleep(ctx.seconds)
        return gradient, None


class _SleepForWeight(torch.autograd.Function):
    """The identity of a layer's weight, whose backward sleeps, or puts that off."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, layer: SplitSleeping) -> Tensor:
        ctx.layer = layer
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None]:
        layer: SplitSleeping = ctx.layer
        if layer.later is not None:
            layer.later.append(lambda: layer.add_for_weight(gradient))
            return None, None
        _sleep(layer.weight_s)
        return gradient, None


_awake = False


@contextmanager
def awake() -> Iterator[None]:
    """A context in which no ``SplitSleeping`` of this process sleeps: for steps whose time is of no interest."""
    global _awake
    _awake = True
    try:
        yield
    finally:
        _awake = False


def _sleep(seconds: float) -> None:
    if not _awake:
        time.sleep(seconds)
