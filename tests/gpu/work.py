"""What the check runs: a small model whose gradients are compared; for a step, a run of the paper with few layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from models.loss import TranslationLoss
from models.shape import PADDING, TransformerShape
from models.transformer import layers
from suite.pipeline.model.layers import meta_device
from suite.pipeline.model.microbatch import ReplicaBatch
from tests.micro_batches import split

ROWS, TIME, MICRO_BATCHES = 8, 16, 4
"""Of the mini-batch whose gradients are compared."""


@dataclass(frozen=True)
class Sizes:
    """The sizes that decide how long the check takes."""

    gradients: TransformerShape
    step: str
    """Settings with which t128_6b runs on one stage."""


ONE_STAGE = "pipeline.stages=1 pipeline.replicas=1 pipeline.remat=except_last"

PAPER = Sizes(
    TransformerShape(2, 256, 512, 4, 1000, dropout=0.0),
    f"{ONE_STAGE} pipeline.micro_batches=16 train.batch_tokens=32768 model.blocks_per_stack=4",
)
"""8 of the paper's 128 layers, with embeddings and head, on micro-batches of a run's size."""

SMALL = Sizes(
    TransformerShape(1, 64, 128, 4, 200, dropout=0.0),
    f"{ONE_STAGE} pipeline.micro_batches=8 train.batch_tokens=1024 model.blocks_per_stack=2 model.width=128 "
    "model.feed_forward=512 model.heads=4 text.vocabulary=1000 text.max_length=32",
)
"""For two cores."""


def model(shape: TransformerShape, dtype: torch.dtype) -> tuple[list[nn.Module], nn.Module]:
    """Returns the layers on the meta device, and the loss."""
    with meta_device():
        return [layer.to(dtype) for layer in layers(shape)], TranslationLoss(shape.label_smoothing)


def make_batch(shape: TransformerShape, seed: int) -> ReplicaBatch:
    """Returns sentence pairs of uneven length, so that masks matter."""
    generator = torch.Generator().manual_seed(seed)

    def words() -> Tensor:
        ids = torch.randint(1, shape.vocabulary, (ROWS, TIME), generator=generator)
        for row in range(ROWS):
            ids[row, TIME - row :] = PADDING
        return ids

    source, target, labels = (words() for _ in range(3))
    inputs = split([source, target], MICRO_BATCHES)
    return ReplicaBatch(inputs, split([labels], MICRO_BATCHES), float((labels != PADDING).sum()))
