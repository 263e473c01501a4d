"""Layers that train: hooks, functions of their own, transforms, gradients and recomputes inside a forward."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.experiments.custom.grammar import Layer, W, layer, parameter, production

# ------------------------------------------------------------------------------------------ autograd functions


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.sign()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -ctx.scale * gradient, None


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


class Sorted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        values, places = x.sort(1)
        ctx.mark_non_differentiable(places)
        ctx.save_for_backward(places)
        return values, places

    @staticmethod
    def backward(ctx, gradient, _):
        return torch.zeros_like(gradient).scatter(1, ctx.saved_tensors[0], gradient)


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
def is_straight_through(self, x):
    return StraightThrough.apply(self.inner(x)) * 0.3


@layer()
def reverses_gradients(self, x):
    return Reversed.apply(self.inner(x), 0.5)


@layer()
def squares_in_place(self, x):
    return SquaresInPlace.apply(self.inner(x) * 0.5)


@layer()
def sorts(self, x):
    values, places = Sorted.apply(self.inner(x))
    return values + places


@layer(w=lambda: parameter(W, W))
def has_an_own_backward(self, x):
    return Product.apply(self.inner(x), self.w)


class Clips(torch.autograd.Function):
    """Clips the gradient of each micro-batch."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.clamp(-0.01, 0.01)


class AddsALoss(torch.autograd.Function):
    """Passes a tensor on, and gives another one a constant gradient."""

    @staticmethod
    def forward(ctx, x, loss):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, gradient.new_full((), 0.01)


@layer()
def clips_gradients(self, x):
    return Clips.apply(self.inner(x))


@layer()
def adds_an_auxiliary_loss(self, x):
    y = self.inner(x)
    return AddsALoss.apply(y, y.square().mean())


@layer()
def hooks_its_output(self, x):
    y = self.inner(x)
    if y.requires_grad:
        y.register_hook(lambda gradient: gradient * 0.5)
    return y


@layer()
def clips_by_a_hook(self, x):
    y = self.inner(x)
    if y.requires_grad:
        y.register_hook(lambda gradient: gradient / gradient.norm().clamp(min=1e-3))
    return y


# ------------------------------------------------------------------------------------------ hooks of modules


@production()
def has_a_forward_hook():
    made = nn.Linear(W, W)
    made.register_forward_hook(lambda module, inputs, output: output * module.weight.sum().tanh())
    return [made]


@production()
def has_a_hook_before():
    made = nn.Linear(W, W)
    made.register_forward_pre_hook(lambda module, inputs: (inputs[0] + module.bias,))
    return [made]


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


@production()
def has_a_hook_before_the_backward():
    made = nn.Linear(W, W)
    made.register_full_backward_pre_hook(lambda module, gradients: (gradients[0] * 2,))
    return [made]


@production(changes=True)
def hooks_a_parameter(linear):
    if linear.weight.requires_grad:
        linear.weight.register_hook(lambda gradient: gradient * 0.3)


@production(changes=True)
def hooks_a_frozen_parameter(linear):
    if linear.weight.requires_grad:
        linear.weight.register_hook(lambda gradient: gradient * 2)
        linear.weight.requires_grad_(False)


@production(changes=True)
def hooks_a_parameter_in_place(linear):
    def halve(gradient):
        gradient.mul_(0.5)

    if linear.weight.requires_grad:
        linear.weight.register_hook(halve)


@production(changes=True)
def hooks_a_bias(linear):
    mask = torch.arange(W) % 2
    if linear.bias is not None and linear.bias.requires_grad:
        linear.bias.register_hook(lambda gradient: gradient * mask.to(gradient))


# ------------------------------------------------------------------------------------------ gradients in a forward


@layer()
def computes_forces(self, x):
    with torch.enable_grad():
        y = x if x.requires_grad else x.detach().requires_grad_()
        energy = torch.tanh(self.inner(y)).square().sum()
        return torch.autograd.grad(energy, y, create_graph=True)[0]


@layer()
def computes_forces_in_a_checkpoint(self, x):
    def force(x):
        with torch.enable_grad():
            y = x if x.requires_grad else x.detach().requires_grad_()
            energy = torch.tanh(self.inner(y)).square().sum()
            return torch.autograd.grad(energy, y, create_graph=True)[0]

    return checkpoint(force, x, use_reentrant=False)


@layer()
def descends_inside(self, x):
    weight = self.inner.weight
    with torch.enable_grad():
        loss = F.linear(x, weight).square().mean()
        (step,) = torch.autograd.grad(loss, weight, create_graph=True)
    return F.linear(x, weight - 0.1 * step, self.inner.bias)


@layer()
def penalises_inside(self, x):
    gradient = torch.func.grad(lambda y: torch.tanh(self.inner(y)).sum())(x)
    return self.inner(x) + gradient


@layer()
def maps_over_rows(self, x):
    return torch.vmap(lambda row: torch.tanh(self.inner(row)))(x)


@layer()
def takes_a_tangent(self, x):
    return torch.func.jvp(lambda y: torch.tanh(self.inner(y)), (x,), (torch.ones_like(x),))[1]


@layer()
def calls_functionally(self, x):
    doubled = {name: 2 * value for name, value in self.inner.named_parameters()}
    return torch.func.functional_call(self.inner, doubled, (x,))


@layer()
def recomputes_itself(self, x):
    return checkpoint(lambda y: torch.tanh(self.inner(self.inner(y))), x, use_reentrant=False)


@layer()
def recomputes_itself_reentrant(self, x):
    return checkpoint(self.inner, x, use_reentrant=True)


@layer()
def drops_in_a_checkpoint(self, x):
    return checkpoint(lambda y: F.dropout(self.inner(y), 0.5, self.training), x, use_reentrant=False)


@layer()
def does_not_follow_a_part(self, x):
    with torch.no_grad():
        scale = self.inner(x).abs().amax(1, keepdim=True)
    return self.inner(x) / (1 + scale)


@layer(teacher=lambda: nn.Sequential(nn.Linear(W, W), nn.Tanh()).requires_grad_(False))
def has_a_teacher(self, x):
    with torch.inference_mode():
        wanted = self.teacher(x.detach())
    return self.inner(x) + wanted.clone()


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
