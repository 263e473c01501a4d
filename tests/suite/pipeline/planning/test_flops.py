"""Counted operations compared with torch's counter on real tensors, and with a formula."""

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
from models.transformer import DecoderLayer, EncoderLayer, Head, TransformerShape
from suite.pipeline.planning.devices import DEVICES
from suite.pipeline.planning.estimate import estimate
from suite.pipeline.planning.flops import step_flops
from suite.pipeline.planning.sample import MicroBatch
from suite.pipeline.runtime.skip import call
from suite.pipeline.schedule.config import ScheduleConfig
from suite.settings import OptimizerSettings
from tests.suite.pipeline.planning.costs import ZERO

SHAPE = TransformerShape(2, 24, 40, 3, 50, head_width=8)
LM = language_model.LanguageModelShape(layers=3, width=16, feed_forward=24, heads=2, vocabulary=40, context_length=7)
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


def on_meta(make):
    with torch.device("meta"):
        return make()


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


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", CASES)
def test_the_count_equals_torchs_forward_and_backward(name, precision):
    make, loss, inputs, targets = CASES[name]
    forwards, backwards = zip(*counted(on_meta(make), loss, inputs, targets, precision), strict=True)
    assert (sum(forwards), sum(backwards)) == by_torch(make(), loss, inputs, targets)
    assert sum(forwards) > 0


def test_a_transformers_count_equals_the_formula_and_its_backward_is_twice_the_forward():
    made, loss, inputs, targets = on_meta(CASES["T(L, H, A)"][0]), *CASES["T(L, H, A)"][1:]
    counts = counted(made, loss, inputs, targets)
    assert [forward for forward, _ in counts] == [3 * row_formula(layer, SHAPE, 7, 5) for layer in made]
    assert all(backward == 2 * forward for forward, backward in counts)


def row_formula(layer, shape, source, target):
    """Operations of one row forward: 2 for each parameter in products and token, and 4 x Q x K x width of attention.
    A decoder layer computes keys and values of the source."""
    width, inner, attention = shape.width, shape.feed_forward, shape.attention_width
    if isinstance(layer, EncoderLayer):
        products = (4 * width * attention + 2 * width * inner) * source
        return 2 * products + 4 * source * source * attention
    if isinstance(layer, DecoderLayer):
        products = (6 * width * attention + 2 * width * inner) * target + 2 * width * attention * source
        return 2 * products + 4 * (target * target + target * source) * attention
    return 2 * width * shape.vocabulary * target if isinstance(layer, Head) else 0


def test_six_operations_per_parameter_and_token_are_most_of_a_deep_model():
    shape = TransformerShape(64, 1024, 16384, 32, 64_000)
    made = on_meta(lambda: transformer.layers(shape))
    tokens = torch.empty(1, 128, dtype=torch.int64, device="meta")
    counts = counted(made, TranslationLoss(0.1), (tokens, tokens), (tokens,))
    inside = [at for at in range(1, len(made) - 1) if at != 65]
    matrices = sum(p.numel() for at in inside for p in made[at].parameters() if p.ndim == 2)
    operations = sum(sum(counts[at]) for at in inside)
    assert 6 * matrices * 128 < operations == pytest.approx(6 * matrices * 128, rel=0.02)


def test_frozen_weights_and_inputs_without_gradients_have_no_backward_products():
    class First(nn.Linear):
        pass

    layers = [First(8, 8, device="meta"), nn.Linear(8, 8, device="meta"), nn.Linear(8, 4, device="meta")]
    layers[2].weight.requires_grad_(False)
    product, head = 2 * 5 * 8 * 8, 2 * 5 * 8 * 4
    found = counted(layers, ClassificationLoss(0.0), (torch.randn(5, 8),), (torch.zeros(5, dtype=torch.int64),))
    assert found[0] == (product, product)  # the data needs no gradient
    assert found[1] == (product, 2 * product)
    assert found[2] == (head, head)


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
