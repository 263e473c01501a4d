"""Layers that train: what Python allows, modules of torch, the meta device."""

import weakref
from functools import partial
from types import MethodType, SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, prune

from tests.experiments.custom.grammar import Layer, W, layer, layers, one_layer, production

# ------------------------------------------------------------------------------------------ Python attributes


@layer(table=lambda: None)
def makes_a_table_at_first(self, x):
    if self.table is None:
        self.table = torch.arange(1.0, W + 1, device=x.device)
    return self.inner(x) * self.table


@layer(last=lambda: None)
def keeps_its_output(self, x):
    self.last = self.inner(x)
    return self.last


@layer(calls=lambda: 0)
def counts_its_calls_for_nothing(self, x):
    self.calls += 1
    return self.inner(x)


@production()
def holds_constants():
    made = Layer(lambda self, x: self.inner(x) * self.parts["mask"][0] + self.other.shift)
    made.parts, made.other = {"mask": [torch.arange(float(W))]}, SimpleNamespace(shift=torch.ones(W))
    return [made]


@production()
def partial_of_its_own_parameter():
    made = Layer(lambda self, x: self.function(x))
    made.function = partial(F.linear, weight=made.inner.weight)
    return [made]


class OwnNames(nn.Module):
    """Attributes, methods and properties of names that the suite uses."""

    def __init__(self):
        super().__init__()
        self.tied, self.stashes, self.pops, self.structure, self.kind = True, 3, "none", object, "B"
        self.score, self.cells, self.indices, self.grad_queue = nn.Linear(W, W), [], nn.Linear(W, W), []
        self.recorded, self.micro_batch, self.splits = {}, 0, False

    @property
    def ties(self):
        return self.score.weight

    @staticmethod
    def prefill(x):
        return x + 1

    @classmethod
    def decode_step(cls, x):
        return 2 * x

    def forward(self, x):
        return self.decode_step(self.prefill(self.indices(F.linear(x, self.ties))))


GLOBAL = nn.Linear(W, W)


@layer(inner=lambda: None, GLOBAL=lambda: nn.Linear(W, W))
def has_an_attribute_named_as_a_global(self, x):
    return self.GLOBAL(x)


@layer(parts=lambda: [nn.Linear(W, W).requires_grad_(False)])
def holds_a_frozen_module(self, x):
    return self.parts[0](self.inner(x))


class Slots:
    __slots__ = ("scale", "shift")


@production()
def holds_an_object_with_slots():
    made = Layer(lambda self, x: self.inner(x) * self.slots.scale + self.slots.shift, slots=Slots())
    made.slots.scale, made.slots.shift = 2.0, torch.ones(W)
    return [made]


class Wraps(nn.Module):
    """Passes all names on to its module, as adapters do."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(W, W)

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, x):
        return self.inner(x) + self.weight.sum()


class KeepsEvaluating(Layer):
    def train(self, mode=True):
        super().train(mode)
        self.drop.eval()
        return self


class ForgetsToReturn(Layer):
    def train(self, mode=True):
        super().train(mode)


@production()
def has_a_patched_forward():
    made = nn.Linear(W, W)
    made.forward = MethodType(lambda self, x: F.linear(x, self.weight * 2), made)
    return [made]


@production()
def chooses_its_forward():
    made = Layer(lambda self, x: self.act(self.inner(x)), helper=torch.tanh)
    made.act = made.forward_by_name = made.helper
    made.forward = made.forward
    return [made]


@production()
def knows_its_parent():
    made = Layer(lambda self, x: self.child(self.inner(x)), child=nn.Identity())
    made.child.parent = [made]
    made.child.forward = MethodType(lambda self, x: x + self.parent[0].inner.bias, made.child)
    return [made]


layers("own_names", lambda: [OwnNames()])
layers("wraps", lambda: [Wraps()])
layers(
    "keeps_a_part_in_evaluation", lambda: [KeepsEvaluating(lambda self, x: self.drop(self.inner(x)), drop=nn.Dropout())]
)
layers("its_train_returns_nothing", lambda: [ForgetsToReturn(lambda self, x: self.inner(x))])


# ------------------------------------------------------------------------------------------ modules of torch


def of_torch(name, make, run=lambda self, x: self.inner(x), replicas=2):
    one_layer(name, run, replicas=replicas, inner=make)


def linear():
    return nn.Linear(W, W)


of_torch("weight_norm", lambda: parametrizations.weight_norm(linear()))
of_torch("old_weight_norm", lambda: nn.utils.weight_norm(linear()))
of_torch("spectral_norm", lambda: parametrizations.spectral_norm(linear()), replicas=1)
of_torch("old_spectral_norm", lambda: nn.utils.spectral_norm(linear()), replicas=1)
of_torch("orthogonal", lambda: parametrizations.orthogonal(linear()))
of_torch("pruned", lambda: prune.random_unstructured(linear(), "weight", 0.5))
of_torch("lstm", lambda: nn.LSTM(W, W, batch_first=True), lambda self, x: self.inner(x[:, None])[0][:, 0])
of_torch("attention", lambda: nn.MultiheadAttention(W, 2), lambda self, x: self.inner(x, x, x)[0])
of_torch("convolution", lambda: nn.Conv1d(1, 1, 3, padding=1), lambda self, x: self.inner(x[:, None])[:, 0])
of_torch("norm", lambda: nn.Sequential(nn.LayerNorm(W), nn.GroupNorm(2, W), nn.RMSNorm(W)))
of_torch("batch_norm", lambda: nn.BatchNorm2d(2), lambda self, x: self.inner(x.view(-1, 2, 3, 1)).view(-1, W))
of_torch("embedding", lambda: nn.Embedding(8, W, padding_idx=0), lambda self, x: x + self.inner((x > 0).sum(1)))


# ------------------------------------------------------------------------------------------ the meta device


class Places(nn.Module):
    def __init__(self):
        super().__init__()
        self.w, self.table = nn.Parameter(torch.empty(W)), nn.Linear(W, W)
        self.register_buffer("ids", torch.arange(W), persistent=False)

    def reset_parameters(self):
        nn.init.normal_(self.w)
        self.table.reset_parameters()
        self.ids = torch.arange(W, device=self.ids.device)

    def forward(self, x):
        return self.table(x)[:, self.ids] * self.w


@production()
def meta_with_reset():
    with torch.device("meta"):
        return [Places(), nn.Sequential(nn.Linear(W, W), nn.LayerNorm(W))]


@production()
def meta_tied():
    with torch.device("meta"):
        first, last = nn.Linear(W, W), nn.Linear(W, W)
        last.weight = first.weight
        return [first, last]


@production()
def weak_reference_to_a_constant():
    class Constant:
        value = 2.0

    constant = Constant()
    return [Layer(lambda self, x: self.inner(x) * self.weak().value, kept=constant, weak=weakref.ref(constant))]
