"""Counted operations compared with torch's counter on real tensors, and with products by hand."""

import sys
from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from models import amoebanet, language_model, transformer
from models.chunked_loss import set_logits_bytes
from models.loss import ClassificationLoss, TranslationLoss
from models.transformer import TransformerShape
from suite.pipeline.planning.devices import DEVICES
from suite.pipeline.planning.estimate import estimate
from suite.pipeline.planning.flops import step_flops
from suite.pipeline.planning.sample import MicroBatch
from suite.pipeline.runtime.skip import call
from suite.pipeline.schedule.config import ScheduleConfig
from suite.settings import OptimizerSettings
from tests.marks import slow_but_for
from tests.suite.pipeline.planning.costs import ZERO, on_meta

SHAPE = TransformerShape(2, 24, 40, 3, 50, head_width=8)
LM = language_model.LanguageModelShape(
    blocks_per_stack=3, width=16, feed_forward=24, heads=2, vocabulary=40, context_length=7
)
IMAGES = amoebanet.AmoebaNetShape(3, 8, classes=7, channels=1, stem="small")


def ids(rows, time):
    return torch.randint(1, 40, (rows, time))


CASES = {
    "T(L, H, A)": (lambda: transformer.layers(SHAPE), TranslationLoss(0.1), (ids(3, 7), ids(3, 5)), (ids(3, 5),)),
    "Transformer-L": (lambda: language_model.layers(LM), TranslationLoss(0.1), (ids(2, 7),), (ids(2, 7),)),
    "AmoebaNet-D": (
        lambda: amoebanet.layers(IMAGES), ClassificationLoss(0.1), (torch.randn(2, 1, 28, 28),),
        (torch.randint(0, 7, (2,)),),
    ),
}  # fmt: skip


def counted(layers, loss, inputs, targets, precision="fp32"):
    """Returns (forward, backward) operations of each layer."""
    settings = OptimizerSettings(precision=precision)
    costs = estimate(layers, loss, MicroBatch(inputs, targets), DEVICES["H100"], settings)
    return [(cost.forward_flops, cost.backward_flops) for cost in costs]


def by_torch(made, loss, inputs, targets):
    """Returns what FlopCounterMode counts of the unpartitioned model, forward and backward."""
    with sdpa_kernel(SDPBackend.MATH):
        with FlopCounterMode(display=False) as forward:
            tensors, stash = inputs, {}
            for layer in made:
                tensors = call(layer, tensors, stash)
            objective, _ = loss(*tensors, *targets)
        with FlopCounterMode(display=False) as backward:
            objective.backward()
    return forward.get_total_flops(), backward.get_total_flops()


COUNTED = [*((name, "fp32") for name in CASES), ("T(L, H, A)", "bf16")]


@pytest.mark.parametrize(("name", "precision"), slow_but_for({*COUNTED} - {("AmoebaNet-D", "fp32")}, COUNTED))
def test_the_count_equals_torchs_forward_and_backward(name, precision):
    make, loss, inputs, targets = CASES[name]
    forwards, backwards = zip(*counted(on_meta(make), loss, inputs, targets, precision), strict=True)
    assert (sum(forwards), sum(backwards)) == by_torch(make(), loss, inputs, targets)
    assert sum(forwards) > 0


def test_chunks_of_logits_are_computed_again():
    """So a run's operations are counted with whole ones (``PlanReport.step_flops``)."""
    shape = TransformerShape(1, 8, 8, 1, 64_000, head_width=8)
    tokens = torch.empty(4, 128, dtype=torch.int64, device="meta")
    layers, product = on_meta(lambda: transformer.layers(shape)), 2 * 8 * 64_000 * 512
    assert counted(layers, TranslationLoss(0.1), (tokens, tokens), (tokens,))[-1] == (product, 3 * product)
    set_logits_bytes(layers, sys.maxsize)
    assert counted(layers, TranslationLoss(0.1), (tokens, tokens), (tokens,))[-1] == (product, 2 * product)


def test_recomputes_count_only_as_hardware_operations():
    counts = [replace(ZERO, forward_flops=10, backward_flops=20)] * 4
    whole = step_flops(counts, (2, 2), ScheduleConfig("fill_drain", (4,)), stages=2, micro_batches=4, units=8)
    assert whole.model_per_unit == whole.hardware_per_unit == 4 * 30 / 8
    paper = step_flops(counts, (2, 2), ScheduleConfig("fill_drain", (1,)), stages=2, micro_batches=4, units=8)
    assert paper.model_per_unit == 4 * 30 / 8
    assert paper.hardware_per_unit == (4 * 30 + 3 / 4 * 40) / 8  # all but the last micro-batch


class Attention(nn.Module):
    """x (rows, heads, time, width) -> the same; notes whether the process has fused attention switched on."""

    fused: ClassVar[set[bool]] = set()

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x):
        self.fused.add(torch.backends.cuda.flash_sdp_enabled())
        x = x * self.scale
        return nn.functional.scaled_dot_product_attention(x, x, x)


def test_counting_switches_nothing_of_the_process():
    """Members of a sweep count in threads of one process. A switch restored out of order would stay off for all."""
    layers = on_meta(lambda: [Attention(), nn.Flatten(), nn.Linear(120, 4)])
    labels = torch.zeros(2, dtype=torch.int64)
    counts = counted(layers, ClassificationLoss(0.0), (torch.randn(2, 3, 5, 8),), (labels,))
    assert Attention.fused == {True}
    product = 2 * (2 * 3) * 5 * 5 * 8
    assert counts[0] == (2 * product, 4 * product)
