"""Weight gradients under bf16 that a product adds to their sum in fp32, as GPUs do.

The CPU has no product of bf16 factors into fp32. So the tests register one: of the factors in fp32, which adds the same
exact terms.
"""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from suite.pipeline.runtime import stage, weight_grad
from suite.pipeline.runtime.nonfinite import find_nonfinite
from suite.pipeline.runtime.weight_grad import WeightGradStore, with_deferrable_linears
from tests.suite.pipeline.runtime.test_weight_casts import CONFIGS, CastCounter, executor, mini_batch

MICRO_BATCHES = 32


def multiply(left, right, out_dtype):
    assert (left.dtype, right.dtype, out_dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    return left.float() @ right.float()


def multiply_and_add(total, left, right, out_dtype, *, beta=1, alpha=1, out):
    assert (beta, alpha) == (1, 1)
    assert out.data_ptr() == total.data_ptr()
    return out.add_(multiply(left, right, out_dtype))


@pytest.fixture
def into_fp32(monkeypatch):
    """Makes the CPU a device with products of bf16 factors into fp32."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("mm.dtype", multiply, "CPU")
    library.impl("addmm.dtype_out", multiply_and_add, "CPU")
    for module in (stage, weight_grad):
        monkeypatch.setattr(module, "MULTIPLIES_BF16_INTO_FP32", ("cpu",))
    yield
    library._destroy()


def linear():
    torch.manual_seed(3)
    return nn.Linear(48, 40)


def train(layer, backward):
    """Runs MICRO_BATCHES micro-batches under autocast; returns the factors of the weight's gradient."""
    generator = torch.Generator().manual_seed(5)
    factors = []
    for _ in range(MICRO_BATCHES):
        x, gradient = (torch.randn(24, width, generator=generator).bfloat16() for width in (48, 40))
        with torch.autocast("cpu", torch.bfloat16):
            out = layer(x)
        backward(out, gradient)
        factors.append((gradient.double(), x.double()))
    return factors


def error(layer, factors):
    """Returns the root mean square of the error of the weight's gradient, relative to its own."""
    exact = sum(gradient.t() @ x for gradient, x in factors)
    return float((layer.weight.grad - exact).square().mean().sqrt() / exact.square().mean().sqrt())


@pytest.mark.parametrize("defers", [False, True])
def test_a_sum_over_micro_batches_is_closer_to_that_in_fp64_than_autocasts(into_fp32, defers):
    plain, split = linear(), with_deferrable_linears(linear())
    store = WeightGradStore(split)

    def backward(out, gradient):
        with store.adding_to_grad():
            if not defers:
                out.backward(gradient)
                return
            for grad in store.run_deferred(lambda: out.backward(gradient)):
                grad.add()

    of_autocast = error(plain, train(plain, lambda out, gradient: out.backward(gradient)))
    in_product = error(split, train(split, backward))
    assert of_autocast > 1e-3  # a product in bf16 has 8 bits
    assert in_product < of_autocast / 1000
    assert split.weight.grad.dtype == torch.float32
    assert torch.equal(split.bias.grad, plain.bias.grad)


def test_products_add_to_one_tensor_and_hooks_run_once_with_the_complete_gradient(into_fp32):
    """A layer may use a module twice; its gradient is complete after the second."""
    once, twice = linear(), nn.Linear(48, 48)
    layer = with_deferrable_linears(nn.Sequential(twice, twice, once))
    store, seen = WeightGradStore(layer), []
    for weight in (once.weight, twice.weight):
        weight.register_post_accumulate_grad_hook(lambda weight: seen.append((weight, weight.grad.clone())))
    addresses = []
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            out = layer(torch.ones(4, 48))
        with store.adding_to_grad():
            out.float().sum().backward()
        addresses.append(once.weight.grad.data_ptr())
    assert len(set(addresses)) == 1
    assert [weight is once.weight for weight, _ in seen] == [True, False] * 3
    assert torch.equal(seen[-1][1], twice.weight.grad)
    for _, gradient in seen[2:4]:  # every step adds the same
        first = seen[0][1] if gradient.shape == seen[0][1].shape else seen[1][1]
        torch.testing.assert_close(gradient, 2 * first, rtol=1e-6, atol=1e-6)


def test_a_gradient_that_a_layer_computes_itself_leaves_the_sum_alone(into_fp32):
    layer = with_deferrable_linears(linear())
    layer.weight.grad = torch.ones_like(layer.weight)
    x = torch.randn(4, 48).bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x).float().square().sum()
    of_x, of_weight = torch.autograd.grad(out, (x, layer.weight))
    assert of_x.shape == x.shape
    assert of_weight.shape == layer.weight.shape
    assert torch.equal(layer.weight.grad, torch.ones_like(layer.weight))


class Slope(nn.Module):
    """Adds the slope of its own linear module to that module's output, and recomputes both in the backward."""

    def __init__(self, use_reentrant):
        super().__init__()
        self.linear, self.use_reentrant = linear(), use_reentrant

    def outputs(self, x):
        leaf = x.detach().requires_grad_()
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(self.linear(leaf).float().sum(), leaf)
        return self.linear(x) + slope.sum()

    def forward(self, x):
        return checkpoint(self.outputs, x, use_reentrant=self.use_reentrant)


def halving():
    """A layer that scales its gradient, which must not scale the sum again and again."""
    layer = nn.Sequential(linear())
    layer[0].weight.register_hook(lambda gradient: gradient / 2)
    return layer


@pytest.mark.parametrize("make", [partial(Slope, True), partial(Slope, False), halving])
def test_a_gradient_that_a_layer_computes_inside_the_backward_or_scales_is_that_of_autocast(into_fp32, make):
    gradients = []
    for layer in (make(), with_deferrable_linears(make())):
        for _ in range(3):
            x = torch.linspace(-1, 1, 4 * 48).view(4, 48).requires_grad_()
            with torch.autocast("cpu", torch.bfloat16):
                out = layer(x).float().square().sum()
            with WeightGradStore(layer).adding_to_grad():
                out.backward()
        gradients.append(next(weight.grad for weight in layer.parameters() if weight.ndim == 2))
    torch.testing.assert_close(*gradients, rtol=2e-2, atol=0.1 if make is halving else 1)


def test_a_gradient_can_be_differentiated_as_that_of_torchs_linear(into_fp32):
    gradients = []
    for layer in (linear(), with_deferrable_linears(linear())):
        x = torch.linspace(-1, 1, 4 * 48).view(4, 48).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            out = torch.tanh(layer(x)).float().sum()
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        slope.square().sum().backward()
        gradients.append((x.grad, layer.weight.grad))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(other, one, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_step_has_the_gradients_of_autocast_up_to_their_rounding(name, request):
    plain = executor(CONFIGS[name])
    plain.train(mini_batch(), 0)
    expected = {key: parameter.grad.clone() for key, parameter in plain.stage.named_parameters().items()}
    request.getfixturevalue("into_fp32")
    trained = executor(CONFIGS[name])
    with CastCounter() as counter:
        losses = trained.train(mini_batch(), 0)
    assert losses == plain.train(mini_batch(), 0)
    changed = 0
    for key, parameter in trained.stage.named_parameters().items():
        torch.testing.assert_close(parameter.grad, expected[key], rtol=2e-2, atol=1e-3)
        changed += not torch.equal(parameter.grad, expected[key])
    assert changed >= 6
    assert max(counter.casts[p.data_ptr()] for p in trained.stage.named_parameters().values()) == 1


def test_numbers_that_are_not_finite_are_traced_to_their_own_micro_batch(into_fp32):
    """Backwards run from the last micro-batch to the first, and a sum stays NaN once it is."""
    trained = executor(CONFIGS["recomputed"])
    poisoned = trained.stage.layers[1].feed.outward.weight

    def spoil(gradient):
        return gradient * torch.nan if trained.status.action.micro_batch == 2 else None

    poisoned.register_hook(spoil)
    with find_nonfinite(trained) as records:
        trained.train(mini_batch(), 0)
    assert (min(records).layer, min(records).micro_batch) == (1, 2)


@pytest.mark.parametrize("value", [-torch.inf, torch.nan])
def test_one_number_that_is_not_finite_is_found(value, into_fp32):
    """Among numbers that are."""
    trained = executor(CONFIGS["recomputed"])

    def spoil(module, inputs, output):
        output = output.clone()
        output.view(-1)[0] = value
        return output

    trained.stage.layers[1].feed.register_forward_hook(spoil)
    with find_nonfinite(trained) as records:
        trained.train(mini_batch(), 0)
    assert (min(records).layer, min(records).micro_batch) == (1, 0)
