"""What layers compute that no pipeline repeats or sends, with a part of the sentence that says so."""

import itertools

import numpy as np
import torch
from torch import nn

from tests.experiments.custom.grammar import Layer, W, layer, one_layer, production

CALLS = itertools.count(1)
NO_TENSOR = "it must return one tensor or a tuple of tensors"


# ------------------------------------------------------------------------------------------ outputs


@layer(f"returns nothing; {NO_TENSOR}")
def returns_nothing(self, x):
    self.inner(x)


@layer("returns no tensors; it must return one")
def returns_an_empty_tuple(self, x):
    self.inner(x)
    return ()


@layer("returns a tensor of complex64, not a real one")
def returns_a_complex_tensor(self, x):
    return torch.fft.fft(self.inner(x))


@layer("does not run on tensors without values")
def branches_on_values(self, x):
    y = self.inner(x)
    return y if y.is_meta or y.sum() > 0 else -y


@layer("must be a parameter or a buffer")
def makes_a_tensor_elsewhere(self, x):
    return self.inner(x) * torch.arange(float(W))


@layer("in evaluation mode and float32")
def returns_less_in_evaluation(self, x):
    return self.inner(x) if self.training else self.inner(x)[:, :3]


@layer("fails in evaluation mode")
def fails_in_evaluation(self, x):
    y = self.inner(x)
    return y if self.training else y @ y


class Marked(torch.Tensor):
    """A tensor with a method."""

    def doubled(self):
        return 2 * self


@production("returns a Marked")
def a_tensor_of_a_class():
    first = Layer(lambda self, x: self.inner(x).as_subclass(Marked))
    return [(first, Layer(lambda self, x: self.inner(x.doubled().as_subclass(torch.Tensor))))]


one_layer("returns_nested_tuples", lambda self, x: (self.inner(x), (x,)), "returns a tuple among its outputs")
one_layer("returns_a_sparse_tensor", lambda self, x: self.inner(x).to_sparse(), "a sparse tensor, not a dense one")
one_layer("detaches", lambda self, x: self.inner(x).detach(), "returns nothing that depends on its parameters")


# ------------------------------------------------------------------------------------------ in place


@layer("changes its inputs in place")
def changes_the_data_of_its_input(self, x):
    x.data.clamp_(-0.1, 0.1)
    return self.inner(x)


@layer("changes its parameter inner.weight in a forward")
def clips_its_weight(self, x):
    self.inner.weight.data.clamp_(-0.1, 0.1)
    return self.inner(x)


@layer("changes its parameter inner.weight in a forward")
def replaces_a_parameter(self, x):
    self.inner.weight = nn.Parameter(self.inner.weight.detach())
    return self.inner(x)


@layer("makes its parameter late.weight in a forward", late=lambda: None)
def makes_a_module_at_first(self, x):
    if self.late is None:
        self.late = nn.Linear(W, W, device=x.device)
    return self.late(self.inner(x))


@layer("changes its parameter inner.weight in a forward")
def freezes_itself(self, x):
    self.inner.weight.requires_grad_(False)
    return self.inner(x)


one_layer("changes_its_input", lambda self, x: self.inner(x.add_(1)), "changes its inputs in place")


# ------------------------------------------------------------------------------------------ state and draws


@layer("it changes its attribute calls; keep state in buffers", calls=lambda: 1)
def counts_its_calls(self, x):
    self.calls += 1
    return self.inner(x) / self.calls


@production("it changes its attribute 1.calls; keep state in buffers")
def has_a_module_that_counts():
    return [nn.Sequential(nn.Tanh(), Layer(counts_its_calls, calls=1))]


@layer("would not repeat its forward", calls=lambda: 0)
def returns_more_each_time(self, x):
    self.calls += 1
    return (self.inner(x),) * self.calls


@layer("fails in another forward from the same state", calls=lambda: 0)
def runs_once(self, x):
    if self.calls:
        raise KeyError("again")
    self.calls += 1
    return self.inner(x)


@layer("changes its attribute cache, and returns other values after other rows", cache=list)
def adds_its_first_rows(self, x):
    self.cache.append(x.detach())
    return self.inner(x) + self.cache[0]


@layer("fails after other rows (ValueError:", cache=list)
def takes_its_first_rows(self, x):
    self.cache.append(x.detach())
    if not torch.equal(self.cache[0], x):
        raise ValueError("other rows")
    return self.inner(x)


@layer("removes its buffer seen in a forward; change its value instead", seen=lambda: torch.zeros(1))
def removes_a_buffer(self, x):
    self.seen = None
    return self.inner(x)


@layer("would not repeat its forward: it draws from its own generator own; keep", own=torch.Generator)
def draws_from_a_generator(self, x):
    return self.inner(x) + torch.rand(1, generator=self.own)


@layer("it draws from its own generator own", own=lambda: np.random.default_rng(0))
def draws_from_a_numpy_generator(self, x):
    return self.inner(x) * self.own.random()


@layer("returns other values for the same inputs and seeds")
def asks_whether_there_is_a_graph(self, x):
    return self.inner(x) * (2 if torch.is_grad_enabled() else 1)


class Noise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient + torch.randn_like(gradient) * 0.1


@layer("does not work with micro-batches", norm=lambda: nn.BatchNorm1d(W))
def has_a_batch_norm(self, x):
    return self.norm(self.inner(x))


one_layer("counts_outside", lambda self, x: self.inner(x) / next(CALLS), "it uses something outside that changes")
one_layer("draws_in_its_backward", lambda self, x: Noise.apply(self.inner(x)), "draws random numbers in its backward")
