"""Several layers, or a change of any linear module, that train: what goes between layers, skips, ties, freezing."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.experiments.custom.grammar import Layer, W, change, layer, layers, parameter, production


def sums(self, x, *others):
    for at, other in enumerate(others):
        x = x + (at + 2) * other
    return self.inner(x)


def between(name, gives, takes=sums):
    """Registers a layer that returns what ``gives`` makes of its output, and one that ``takes`` it."""

    def pair():
        return [(Layer(lambda self, x: gives(self.inner(x))), Layer(takes))]

    layers(name, pair)


between("one_tensor_twice", lambda y: (y, y))
between("a_tensor_and_its_view", lambda y: (y, y[:, :1]))
between("a_tensor_and_an_expanded_one", lambda y: (y, y.mean(0).expand_as(y)))
between("two_views", lambda y: y.chunk(2, 1), lambda self, a, b: self.inner(torch.cat([b, a], 1)))
between("an_unused_tensor", lambda y: (y, y * 2), lambda self, x, _: self.inner(x))
between("a_detached_tensor", lambda y: (y, y.detach() * 2))
between("integers", lambda y: (y, (y > 0).long()))
between("booleans", lambda y: (y, y > 0), lambda self, x, mask: self.inner(x.masked_fill(mask, 0)))
between("a_tensor_without_axes", lambda y: (y, y.mean()))
between("a_tensor_without_values", lambda y: (y, y[:, :0]), lambda self, x, none: self.inner(x) + none.sum())
between("double_tensors", torch.Tensor.double, lambda self, x: self.inner(x.float()))
between("half_tensors", torch.Tensor.half, lambda self, x: self.inner(x.float()))
between("bf16_tensors", lambda y: (y.bfloat16(), y), lambda self, x, y: self.inner(x.float() + y))
between("transposed_tensors", torch.t, lambda self, x: self.inner(x.t()))
between("more_rows", lambda y: y.repeat(2, 1), lambda self, x: self.inner(x).view(2, -1, W).sum(0))
between("a_flat_tensor", torch.flatten, lambda self, x: self.inner(x.view(-1, W)))
between("changed_in_place_later", lambda y: (y.clone(), y), lambda self, x, y: self.inner(x.clone().mul_(y)))
between("indices_of_the_largest", lambda y: y.topk(3), lambda self, x, at: self.inner(F.pad(x, (0, 3))) + at.sum())


def stash(source, target, *names):
    source.gpipe_stashes = target.gpipe_pops = names
    return [source, target]


@production()
def two_skips():
    return stash(Layer(lambda self, x: (x, x.sign().long(), self.inner(x))), Layer(sums), "signs", "values")


@production()
def a_skip_that_nobody_uses():
    return stash(Layer(lambda self, x: (self.inner(x), x)), Layer(lambda self, x, _: self.inner(x)), "unused")


@production()
def a_skip_beside_a_tie():
    source = Layer(lambda self, x: (self.inner(x), x @ self.inner.weight))
    target = Layer(sums)
    target.inner.weight = source.inner.weight
    return stash(source, target, "tied")


layers(
    "a_skip", lambda: stash(Layer(lambda self, x: (lambda y: (torch.tanh(y), y))(self.inner(x))), Layer(sums), "skip")
)
layers(
    "a_skip_of_its_output", lambda: stash(Layer(lambda self, x: (lambda y: (y, y))(self.inner(x))), Layer(sums), "same")
)
layers("a_skip_of_its_input", lambda: stash(Layer(lambda self, x: (self.inner(x), x)), Layer(sums), "before"))


# ------------------------------------------------------------------------------------------ ties


@production()
def one_parameter_in_two_layers():
    first, last = nn.Linear(W, W), Layer(lambda self, x: torch.tanh(self.inner(x)))
    last.inner.weight = first.weight
    return [first, last]


@production()
def one_module_in_two_layers():
    shared = nn.Sequential(nn.Linear(W, W), nn.Tanh())
    return [
        Layer(lambda self, x: self.shared(x), shared=shared),
        Layer(lambda self, x: self.shared(x) + x, shared=shared),
    ]


@production()
def one_frozen_parameter_in_two_layers():
    w = parameter(W, W).requires_grad_(False)
    return [Layer(lambda self, x: x @ self.w, w=w), Layer(lambda self, x: self.inner(x) @ self.w, w=w)]


@production()
def one_hooked_parameter_in_two_layers():
    w = parameter(W, W)
    w.register_hook(lambda gradient: gradient * 0.3)
    return [Layer(lambda self, x: x @ self.w, w=w), Layer(lambda self, x: F.linear(x, self.w), w=w)]


@production()
def one_buffer_in_two_layers():
    table = torch.randn(W)
    return [Layer(lambda self, x: self.inner(x) * self.table, table=table) for _ in range(2)]


@production()
def one_constant_in_two_layers():
    made = [Layer(lambda self, x: self.inner(x) * self.constants[0]) for _ in range(2)]
    made[0].constants = made[1].constants = [torch.randn(W)]
    return made


@production()
def one_configuration_in_two_layers():
    class Configuration:
        scale, calls = 2.0, 0

    made = [Layer(lambda self, x: self.inner(x) * self.configuration.scale) for _ in range(2)]
    made[0].configuration = made[1].configuration = Configuration()
    return made


layers("one_layer_twice", lambda: [nn.Linear(W, W)] * 2)
layers("one_layer_without_parameters_twice", lambda: [nn.Tanh()] * 2)


@layer(index=lambda: 1)
def equals_another(self, x):
    return self.inner(x) * self.index


@production()
def equal_layers():
    return [Layer(equals_another, index=index) for index in (1, 1, 2)]


# ------------------------------------------------------------------------------------------ any linear module


@production(changes=True)
def partly_frozen(linear):
    if linear.bias is not None:
        linear.bias.requires_grad_(False)


@production(changes=True)
def slow(linear):
    linear.weight.slow = True


@production(changes=True)
def transposed_weight(linear):
    linear.weight.data = linear.weight.data.t().contiguous().t()


change("frozen", lambda linear: linear.requires_grad_(False))
change("only_the_bias_trains", lambda linear: linear.weight.requires_grad_(False))
change("in_evaluation", lambda linear: linear.eval())
change("without_bias", lambda linear: linear.register_parameter("bias", None))
change("hooked_after_the_forward", lambda linear: linear.register_forward_hook(lambda *args: args[2].clone().add_(1)))
change("has_a_large_weight", lambda linear: linear.weight.data.mul_(30))
