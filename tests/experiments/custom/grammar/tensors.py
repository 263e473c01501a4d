"""Layers that train: outputs, in-place operations, parameters, buffers, draws."""

import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from tests.experiments.custom.grammar import Layer, W, layer, one_layer, parameter, production

# ------------------------------------------------------------------------------------------ outputs and operations


@layer()
def adds_in_place(self, x):
    y = self.inner(x)
    y += 1
    return y.tanh_()


@layer()
def uses_autocast(self, x):
    with torch.autocast("cpu", torch.bfloat16):
        y = self.inner(x)
    return y.float()


one_layer("expands", lambda self, x: self.inner(x).mean(1, keepdim=True).expand(-1, W))
one_layer("returns_a_transposed_view", lambda self, x: self.inner(x).t().contiguous().t())
one_layer("returns_its_input", lambda self, x: x, inner=lambda: None)
one_layer("returns_a_list", lambda self, x: [self.inner(x)])
one_layer("stops_the_gradient", lambda self, x: x.detach(), inner=lambda: None)
one_layer("mixes_rows", lambda self, x: self.inner(x - x.mean(0)) * len(x))
one_layer("depends_on_the_mode", lambda self, x: self.inner(x) * (2 if self.training else 1))


# ------------------------------------------------------------------------------------------ parameters and buffers


class Subclass(nn.Parameter):
    """A parameter of a class of its own."""


@layer(w=lambda: parameter(W, W))
def uses_a_parameter_twice(self, x):
    return F.linear(torch.tanh(F.linear(self.inner(self.inner(x)), self.w)), self.w)


@layer(w=lambda: nn.Parameter(torch.arange(W), requires_grad=False))
def has_an_integer_parameter(self, x):
    return self.inner(x)[:, self.w]


@layer(w=lambda: nn.Parameter(torch.randn(W).half(), requires_grad=False))
def has_frozen_fp16(self, x):
    return self.inner(x) * self.w.float()


@layer(w=lambda: nn.Parameter(torch.randn(W).double()))
def has_a_double_parameter(self, x):
    return (self.inner(x) * self.w).float()


@layer(ws=lambda: nn.ParameterList([parameter(W), parameter(W)]), by_name=lambda: nn.ParameterDict({"a": parameter(W)}))
def has_parameter_lists(self, x):
    return self.inner(x) * self.ws[0] + self.ws[1] * self.by_name["a"]


@layer(mask=lambda: torch.arange(W) % 2 == 0, scalar=lambda: torch.tensor(2.0))
def has_odd_buffers(self, x):
    return self.inner(x) * self.mask * self.scalar


@production()
def has_nothing_registered():
    made = Layer(lambda self, x: self.inner(x) if self.none is None else x)
    made.register_buffer("none", None)
    made.register_parameter("nothing", None)
    made.register_buffer("gone", torch.ones(W), persistent=False)
    return [made]


@production()
def buffer_of_two_names():
    made = Layer(lambda self, x: self.inner(x) * self.b, a=torch.full((1,), 0.5))
    made.register_buffer("b", made.a)
    return [made]


@production()
def parameters_in_one_memory():
    flat = torch.randn(2 * W * W)
    made = [Layer(lambda self, x: self.inner(x)) for _ in range(2)]
    for at, each in enumerate(made):
        each.inner.weight.data = flat[at * W * W :][: W * W].view(W, W)
    return made


@layer(replicas=1, count=lambda: torch.zeros(1))
def counts_in_a_buffer(self, x):
    self.count += 1
    return self.inner(x) / self.count


@layer(replicas=1, queue=lambda: torch.zeros(4, W), place=lambda: torch.zeros(1, dtype=torch.long))
def keeps_a_queue(self, x):
    self.queue = torch.cat([self.queue[1:], x.detach()[:1]])
    self.place = (self.place + 1) % 4
    return self.inner(x) + self.queue.mean(0)


one_layer("has_a_transposed_parameter", lambda self, x: x @ self.w, w=lambda: nn.Parameter(torch.randn(W, W).t()))
one_layer(
    "has_an_empty_parameter", lambda self, x: torch.cat([self.inner(x), x @ self.w], 1), w=lambda: parameter(W, 0)
)
one_layer("has_an_unused_parameter", lambda self, x: self.inner(x), w=lambda: parameter(W))
one_layer("has_a_parameter_class", lambda self, x: self.inner(x) * self.w, w=lambda: Subclass(torch.randn(W)))
one_layer(
    "has_a_buffer_with_gradient", lambda self, x: self.inner(x) * self.w, w=lambda: torch.ones(W, requires_grad=True)
)


# ------------------------------------------------------------------------------------------ draws


@layer()
def seeds_itself(self, x):
    torch.manual_seed(3)
    return self.inner(x) + torch.rand_like(x)


one_layer("drops", lambda self, x: F.dropout(self.inner(x), 0.4, self.training))
one_layer("draws_from_numpy", lambda self, x: self.inner(x) * float(np.random.rand()))
one_layer("drops_itself", lambda self, x: x if self.training and random.random() < 0.5 else self.inner(x))
