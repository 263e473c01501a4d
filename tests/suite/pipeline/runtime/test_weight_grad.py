"""Deferred gradients of weights: the same numbers, later."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from experiments.tables.sleeping import SquareError
from suite.pipeline.model.microbatch import ReplicaBatch
from suite.pipeline.runtime import weight_grad
from suite.pipeline.runtime.weight_grad import WeightGradStore, with_deferrable_linears
from suite.pipeline.schedule.config import ScheduleConfig
from suite.pipeline.schedule.remat import UNLIMITED
from tests.suite.pipeline.build import alone, unpartitioned


def two(bias=True, dtype=torch.float64):
    """Returns a plain stack and one of the same values that can defer them."""
    stacks = []
    for _ in range(2):
        torch.manual_seed(3)
        stacks.append(nn.Sequential(nn.Linear(5, 7, bias), nn.LayerNorm(7), nn.Tanh(), nn.Linear(7, 4, bias)).to(dtype))
    return stacks[0], with_deferrable_linears(stacks[1])


def gradients(module):
    return {name: parameter.grad.clone() for name, parameter in module.named_parameters()}


@pytest.mark.parametrize(
    ("shape", "bias", "dtype"),
    [((3, 5), True, torch.float64), ((2, 3, 5), False, torch.float64), ((2, 3, 5), True, torch.float32)],
)
def test_two_parts_give_the_gradients_of_one(shape, bias, dtype):
    plain, split = two(bias, dtype)
    x = torch.randn(*shape, dtype=dtype)
    given, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    plain(given).square().sum().backward()
    out = split(other)
    assert torch.equal(out, plain(given))
    later = WeightGradStore(split).run_deferred(lambda: out.square().sum().backward())
    close = {"rtol": 0, "atol": 1e-12 if dtype == torch.float64 else 1e-5}
    torch.testing.assert_close(other.grad, given.grad, **close)
    names = {name for name, parameter in split.named_parameters() if parameter.grad is None}
    assert names == {f"{at}.{what}" for at in (0, 3) for what in (["weight", "bias"] if bias else ["weight"])}
    assert [grad.add() for grad in later] == [None, None]
    torch.testing.assert_close(gradients(split), gradients(plain), **close)


def test_under_autocast_factors_are_bf16_and_gradients_those_of_the_plain_layer():
    plain, split = two(dtype=torch.float32)
    x = torch.randn(6, 5)
    results = []
    for stack in (plain, split):
        given = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            out = stack(given)
        assert out.dtype == torch.bfloat16
        for grad in WeightGradStore(stack).run_deferred(lambda out=out: out.float().sum().backward()):
            grad.add()
        results.append({"x": given.grad, **gradients(stack)})
        assert all(value.dtype == torch.float32 for value in results[-1].values())
    torch.testing.assert_close(results[1], results[0], rtol=2e-2, atol=2e-2)  # a product of bf16 keeps 8 bits


def test_a_layer_changed_in_place_behind_it_is_still_right():
    plain, split = two()
    x = torch.randn(2, 3, 5, dtype=torch.float64)
    for stack in (plain, split):
        torch.nn.functional.hardtanh(stack(x), -0.1, 0.1, inplace=True).sum().backward()
    torch.testing.assert_close(gradients(split), gradients(plain), rtol=0, atol=1e-12)


def gradients_of(actions, make_layers, monkeypatch=None):
    """Returns the gradients of one stage with these actions, those of the whole model, and the actions whose linear
    layers can be split."""
    seen, apply = [], weight_grad._DeferrableLinear.apply

    def counted(*arguments):
        seen.append(str(executor.status.action))
        return apply(*arguments)

    if monkeypatch is not None:
        monkeypatch.setattr(weight_grad._DeferrableLinear, "apply", counted)
    config = ScheduleConfig("csv", (UNLIMITED,), rows=(actions,))
    with torch.device("meta"):
        layers = [layer.double() for layer in make_layers()]
    executor = alone(layers, SquareError(), config)
    rows = torch.randn(actions.count("F"), 2, 5, dtype=torch.float64)
    batch = ReplicaBatch([(x,) for x in rows], [(torch.zeros(2, 4, dtype=torch.float64),)] * len(rows), 6.0)
    executor.train(batch, 0)
    _, expected = unpartitioned(layers, SquareError(), batch, 0)
    return {key: parameter.grad for key, parameter in executor.stage.named_parameters().items()}, expected, seen


def test_only_the_micro_batches_of_which_a_schedule_splits_the_backward_pay_for_it(monkeypatch):
    """In the others a linear layer is torch's own; in both the gradients are those of the whole model."""
    actions = "0F0 0F1 0I0 0W0 0B1 0F2 0R2 0I2 0W2"
    found, expected, seen = gradients_of(
        actions, lambda: [nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 4)], monkeypatch
    )
    assert set(seen) == {"F0", "R2"}
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


class Recomputing(nn.Module):
    """A linear layer that runs again in its backward."""

    def __init__(self, reentrant):
        super().__init__()
        self.linear, self.reentrant = nn.Linear(5, 5), reentrant

    def forward(self, x):
        return checkpoint(self.linear, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_layer_that_recomputes_in_its_backward_does_as_in_its_forward(reentrant):
    """Between F0 and I0 runs a forward whose backward is not split."""
    rows = "0F0 0F1 0I0 0W0 0B1"
    found, expected, _ = gradients_of(rows, lambda: [nn.Linear(5, 5), Recomputing(reentrant), nn.Linear(5, 4)])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


class Forces(nn.Module):
    """Returns the gradient of what a linear layer makes of its input, computed again in its backward."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x):
        return checkpoint(self.force, x, use_reentrant=False)

    def force(self, x):
        return torch.autograd.grad(torch.tanh(self.linear(x)).square().sum(), x, create_graph=True)[0]


class Functional(Forces):
    """Calls its linear layer with other weights."""

    def forward(self, x):
        return torch.func.functional_call(self.linear, {"weight": 2 * self.linear.weight}, (x,))


@pytest.mark.parametrize("kind", [Forces, Functional])
def test_a_gradient_inside_a_recompute_and_one_of_other_weights_are_not_deferred(kind):
    found, expected, _ = gradients_of("0F0 0F1 0I0 0W0 0B1", lambda: [nn.Linear(5, 5), kind(), nn.Linear(5, 4)])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


class Doubling(nn.Parameter):
    """A weight with a product of its own."""

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), keywords=None):
        found = super().__torch_function__(function, types, arguments, keywords or {})
        return 2 * found if function is nn.functional.linear else found


def test_a_weight_with_a_product_of_its_own_keeps_it():
    linear = nn.Linear(5, 5)
    linear.weight = Doubling(linear.weight.detach())
    assert type(with_deferrable_linears(linear)) is nn.Linear
