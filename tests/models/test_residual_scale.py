"""``residual_scale``: output matrices start small and move slowly, as if blocks of usual size were multiplied."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from experiments.registry import find
from models import language_model, transformer
from models.blocks import CrossAttention, FeedForward, SelfAttention
from models.language_model import LanguageModelShape
from models.loss import TranslationLoss
from models.shape import TransformerShape
from suite.errors import SettingError
from suite.settings import OptimizerSettings
from suite.training.update_rule import make_optimizer, param_groups
from tests.models.test_transformer import run

BLOCKS = (SelfAttention, CrossAttention, FeedForward)
SHAPES = {
    "translation": TransformerShape(3, 32, 48, 2, 40, head_width=16, dropout=0.0, residual_scale=0.6),
    "language model": LanguageModelShape(3, 32, 48, 2, 40, context_length=6, residual_scale=0.6),
}
SCALE = 0.1
"""0.6 / (2 x 3 layers)."""


def model_of(shape: TransformerShape | LanguageModelShape) -> nn.Sequential:
    torch.manual_seed(2)
    build = transformer.layers if isinstance(shape, TransformerShape) else language_model.layers
    return nn.Sequential(*build(shape)).double()  # type: ignore[arg-type]


def blocks_of(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, BLOCKS)]


DEEP = (4, 64, 256, 2, 40)
"""Numbers of a shape of 4 layers, whose attention is as wide as the model."""


@pytest.mark.parametrize(
    ("shape", "attention", "feed_forward"),
    [
        (TransformerShape(*DEEP, head_width=32), 1, 1 / 4),
        (TransformerShape(*DEEP, head_width=32, depth_scaled_init=False), 1, 1),
        (TransformerShape(*DEEP, head_width=32, residual_scale=0.5), 0.5 / 8, 0.5 / 8),
        (LanguageModelShape(*DEEP), 1 / 4, 1 / 4),
        (LanguageModelShape(*DEEP, residual_scale=0.5), 0.5 / 8, 0.5 / 8),
    ],
)
def test_every_output_matrix_starts_scaled_by_depth_and_no_other(
    shape: TransformerShape | LanguageModelShape, attention: float, feed_forward: float
) -> None:
    """Glorot's standard deviation of each of the matrices that are one projection, times the scale."""
    for block in blocks_of(model_of(shape)):
        is_feed_forward = isinstance(block, FeedForward)
        for name, child in block.named_children():
            fused = 1 if is_feed_forward else child.out_features // 64
            plain = math.sqrt(2 / (child.in_features + child.out_features // fused))
            scale = (feed_forward if is_feed_forward else attention) if name == "outward" else 1
            assert child.weight.std().item() == pytest.approx(plain * scale, rel=0.06), name


@pytest.mark.parametrize(
    ("task", "optimizer"),
    [*(("translation", name) for name in ("adamw", "adafactor", "rmsprop", "sgd")), ("language model", "adamw")],
)
def test_training_is_that_of_usual_blocks_whose_outputs_are_multiplied(task: str, optimizer: str) -> None:
    """The factors of the rate and of the decay are right if both have the same values after some steps."""
    small = model_of(SHAPES[task])
    for name, parameter in small.named_parameters():
        if name.endswith("bias"):  # at 0, Adafactor's step would not follow the size
            nn.init.normal_(parameter, std=0.5 * (SCALE if ".outward." in name else 1))
        # the gradient of the keys' biases is 0 but for rounding, which AdamW and Adafactor would follow
        parameter.requires_grad_(not name.endswith("inward.bias"))
    usual = copy.deepcopy(small)
    for block in blocks_of(usual):
        block.register_forward_hook(lambda module, inputs, output: output * SCALE)
        for parameter in block.outward.parameters():  # type: ignore[union-attr, operator]
            parameter.data /= SCALE
    rate = {"sgd": 0.02, "adafactor": 0.03}.get(optimizer, 3e-3)
    settings = OptimizerSettings(name=optimizer, learning_rate=rate, weight_decay=0.1, epsilon=1e-30)
    run = find("t12_400m" if task == "translation" else "transformer_13")
    run = run.model_copy(update={"model": SHAPES[task], "optimizer": settings})
    train(small, settings, run.update_factors)
    train(usual, settings, lambda name, parameter: (1.0, 1.0))
    for (name, found), expected in zip(small.named_parameters(), usual.parameters(), strict=True):
        factor = SCALE if ".outward." in name else 1.0
        torch.testing.assert_close(found, expected * factor, rtol=1e-6, atol=1e-9, msg=name)


def train(model: nn.Sequential, settings: OptimizerSettings, factors) -> None:  # type: ignore[no-untyped-def]
    keyed = {(0, name): parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    groups = param_groups(keyed, {key: factors(key[1], parameter) for key, parameter in keyed.items()}, settings)
    optimizer = make_optimizer(groups, settings)
    generator = torch.Generator().manual_seed(5)
    for _ in range(4):
        ids = torch.randint(4, 40, (3, 7), generator=generator)
        source = [torch.randint(4, 40, (3, 5), generator=generator)] if len(model) == 2 * 3 + 3 else []
        objective, _ = TranslationLoss(0.0)(run(model, *source, ids[:, :-1]), ids[:, 1:])
        optimizer.zero_grad()
        (objective / 18).backward()
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * group["lr_factor"]
        optimizer.step()


def test_without_it_no_parameter_has_a_rate_of_its_own() -> None:
    for name in ("t128_6b", "transformer_13"):
        run = find(name)
        assert run.model.residual_scale is None
        assert run.update_factors("3.feed.outward.weight", nn.Parameter(torch.ones(1))) == (1.0, 1.0)


@pytest.mark.parametrize("scale", [-1.0, 1e-200, 1e200, math.nan])
def test_a_scale_without_a_finite_factor_of_the_decay_is_refused(scale: float) -> None:
    for name in ("t128_6b", "transformer_13"):
        with pytest.raises(ValueError, match="residual_scale\n  Input should be"):
            replace(find(name).model, residual_scale=scale)
    for kept in (1e-6, 1e6):
        run = find("t128_6b").with_settings(f"model.residual_scale={kept} optimizer.name=rmsprop")
        assert all(map(math.isfinite, run.update_factors("3.feed.outward.weight", nn.Parameter(torch.ones(1)))))


def test_a_start_that_the_scale_replaces_is_refused() -> None:
    small = find("t128_6b").with_settings("model.residual_scale=1")
    with pytest.raises(SettingError, match="depth_scaled_init=false has no effect with residual_scale=1; set"):
        small.with_settings("model.depth_scaled_init=false")
    assert not small.with_settings("model.depth_scaled_init=false model.residual_scale=none").model.residual_scale
