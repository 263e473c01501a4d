"""With bf16 a step casts each weight once, and computes the same numbers as with a cast in each action."""

from collections import Counter
from contextlib import contextmanager

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from models.loss import TranslationLoss
from models.transformer import TransformerShape, layers
from suite.pipeline.model.microbatch import ReplicaBatch
from suite.pipeline.runtime.weight_grad import DeferrableLinear, WeightGradStore, with_deferrable_linears
from suite.pipeline.schedule.config import ScheduleConfig
from tests.suite.pipeline.build import alone

MICRO_BATCHES = 4
SHAPE = TransformerShape(1, 64, 128, 2, vocabulary=100, head_width=32)
CONFIGS = {
    "recomputed": ScheduleConfig("fill_drain", (1,)),
    "kept": ScheduleConfig("fill_drain", (MICRO_BATCHES,)),
    "deferred": ScheduleConfig("zero_bubble", (MICRO_BATCHES,)),
}


class CastCounter(TorchDispatchMode):
    """Counts the casts of each tensor to bf16, by its address."""

    def __init__(self):
        super().__init__()
        self.casts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and result.dtype == torch.bfloat16:
            self.casts[args[0].data_ptr()] += 1
        return result


def executor(config):
    return alone(layers(SHAPE), TranslationLoss(0.1), config, "bf16")


def mini_batch():
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(4, 100, (2, 16), generator=generator) for _ in range(MICRO_BATCHES)]
    return ReplicaBatch([(one, one) for one in ids], [(one,) for one in ids], 100.0)


@contextmanager
def cast_in_each_action():
    yield


@pytest.mark.parametrize("name", CONFIGS)
def test_two_steps_compute_the_same_as_with_a_cast_in_each_action(name, monkeypatch):
    """The weights change between the steps, so a copy that outlived its step would show."""
    results = []
    for casts_once in (True, False):
        trained = executor(CONFIGS[name])
        if not casts_once:
            monkeypatch.setattr(trained.stage, "weights_cast_once", cast_in_each_action)
        losses = []
        for step in range(2):
            for parameter in trained.stage.layers.parameters():
                parameter.grad = None
            with CastCounter() as counter:
                losses.append(trained.train(mini_batch(), step))
            weights = [parameter for parameter in trained.stage.layers.parameters() if parameter.ndim == 2]
            assert casts_once == (max(counter.casts[weight.data_ptr()] for weight in weights) == 1)
            with torch.no_grad():
                for parameter in trained.stage.layers.parameters():
                    parameter -= 0.1 * parameter.grad
        gradients = {key: parameter.grad for key, parameter in trained.stage.named_parameters().items()}
        assert {gradient.dtype for gradient in gradients.values()} == {torch.float32}
        results.append((losses, gradients))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(gradient, results[1][1][key]) for key, gradient in results[0][1].items())


@pytest.mark.parametrize("grad", [True, False])
def test_a_product_outside_autocast_does_not_get_the_cast(grad):
    """A layer may compute some products in fp32, with the same weight."""
    linear = with_deferrable_linears(torch.nn.Linear(4, 3))
    store = WeightGradStore(linear)
    store.keep_casts(True)
    x = torch.randn(2, 4)
    with torch.set_grad_enabled(grad):
        with torch.autocast("cpu", torch.bfloat16):
            assert linear(x).dtype == torch.bfloat16
        assert torch.equal(linear(x), torch.nn.functional.linear(x, linear.weight, linear.bias))


def test_no_cast_outlives_its_step_even_if_it_fails(monkeypatch):
    def fail(*args):
        raise ZeroDivisionError

    trained = executor(CONFIGS["deferred"])
    linears = [module for module in trained.stage.layers.modules() if isinstance(module, DeferrableLinear)]
    trained.train(mini_batch(), 0)
    assert linears
    assert all(linear.kept_cast is None and not linear.keeps_cast for linear in linears)
    monkeypatch.setattr(trained.stage.loss, "forward", fail)
    with pytest.raises(ZeroDivisionError):
        trained.train(mini_batch(), 0)
    assert all(linear.kept_cast is None for linear in linears)
    assert torch.autocast_increment_nesting() == 1
    torch.autocast_decrement_nesting()
