"""Layers that train: hooks, functions of their own, transforms, gradients and recomputes inside a forward."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.experiments.custom.grammar import Layer, W, hooked, hooks_its_weight, layer, one_layer, parameter, production

# ------------------------------------------------------------------------------------------ autograd functions


class SquaresInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.clone())
        ctx.mark_dirty(x)
        return x.square_()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        return 2 * ctx.saved_tensors[0] * gradient


class Product(torch.autograd.Function):
    """A linear layer whose backward takes its own gradients."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = (tensor.detach().requires_grad_() for tensor in ctx.saved_tensors)
        with torch.enable_grad():
            return torch.autograd.grad(torch.tanh(x @ weight), (x, weight), gradient)


@layer()
def hooks_its_output(self, x):
    y = self.inner(x)
    if y.requires_grad:
        y.register_hook(lambda gradient: gradient * 0.5)
    return y


one_layer("squares_in_place", lambda self, x: SquaresInPlace.apply(self.inner(x) * 0.5))
one_layer("has_an_own_backward", lambda self, x: Product.apply(self.inner(x), self.w), w=lambda: parameter(W, W))


# ------------------------------------------------------------------------------------------ hooks of modules


@production()
def has_a_hook_with_keywords():
    made = Layer(lambda self, x: self.child(x=x), child=Layer(lambda self, x: self.inner(x)))
    made.child.forward = lambda x, child=None: x * 2
    made.register_forward_pre_hook(lambda module, inputs, keywords: (inputs, keywords), with_kwargs=True)
    return [made]


@production()
def has_a_backward_hook():
    def halves(module, before, after):
        return tuple(each if each is None else each * 0.5 for each in before)

    made = Layer(lambda self, x: torch.tanh(self.inner(x)))
    made.inner.register_full_backward_hook(halves)
    return [made]


@production(changes=True)
def hooks_a_frozen_parameter(linear):
    if linear.weight.requires_grad:
        linear.weight.register_hook(lambda gradient: gradient * 2)
        linear.weight.requires_grad_(False)


def halve(gradient):
    gradient.mul_(0.5)


hooked("has_a_forward_hook", "register_forward_hook", lambda module, _, output: output * module.weight.sum().tanh())
hooked("has_a_hook_before", "register_forward_pre_hook", lambda module, inputs: (inputs[0] + module.bias,))
hooked("has_a_hook_before_the_backward", "register_full_backward_pre_hook", lambda _, gradients: (gradients[0] * 2,))
hooks_its_weight("hooks_a_parameter", lambda gradient: gradient * 0.3)
hooks_its_weight("hooks_a_parameter_in_place", halve)


# ------------------------------------------------------------------------------------------ gradients in a forward


@layer()
def computes_forces_in_a_checkpoint(self, x):
    def force(x):
        with torch.enable_grad():
            y = x if x.requires_grad else x.detach().requires_grad_()
            energy = torch.tanh(self.inner(y)).square().sum()
            return torch.autograd.grad(energy, y, create_graph=True)[0]

    return checkpoint(force, x, use_reentrant=False)


@layer()
def drops_in_a_checkpoint(self, x):
    return checkpoint(lambda y: F.dropout(self.inner(y), 0.5, self.training), x, use_reentrant=False)


@layer(teacher=lambda: nn.Sequential(nn.Linear(W, W), nn.Tanh()).requires_grad_(False))
def has_a_teacher(self, x):
    with torch.inference_mode():
        wanted = self.teacher(x.detach())
    return self.inner(x) + wanted.clone()


one_layer("maps_over_rows", lambda self, x: torch.vmap(lambda row: torch.tanh(self.inner(row)))(x))
one_layer("recomputes_itself_reentrant", lambda self, x: checkpoint(self.inner, x, use_reentrant=True))


# ------------------------------------------------------------------------------------------ tensors with a class


class Doubling(nn.Parameter):
    """A weight that counts twice in a product."""

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), keywords=None):
        if function is F.linear:
            x, weight, *bias = arguments
            with torch._C.DisableTorchFunctionSubclass():
                return 2 * F.linear(x, weight, *bias)
        return super().__torch_function__(function, types, arguments, keywords or {})


@production()
def has_a_weight_with_its_own_product():
    made = nn.Linear(W, W)
    made.weight = Doubling(made.weight.detach())
    return [made]
