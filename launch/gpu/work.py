"""What the check of a GPU trains: sizes, a whole T(L, H, A), a cell of one, and micro-batches without any text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from experiments.flops import Rows, forward_flops
from experiments.translation import t12_400m, t128_6b
from models.loss import TranslationLoss
from models.shape import TransformerShape
from models.transformer import DecoderLayer, EncoderLayer, layers
from suite.pipeline.layers import count_parameters
from suite.pipeline.microbatch import MiniBatch
from suite.pipeline.profile import MicroBatch
from suite.settings import OptimizerSettings

FIRST_WORD = 4
"""The first token id that is a word."""


@dataclass(frozen=True)
class Sizes:
    """All that decides how long the check takes; tests make it small."""

    whole: TransformerShape
    cell: TransformerShape
    cell_layers: int
    optimizer: OptimizerSettings
    rows: int
    time: int
    """Tokens a row, source and target alike, no padding."""
    gradients: TransformerShape
    gradient_rows: int = 8
    gradient_time: int = 16
    gradient_micro_batches: int = 4
    micro_batches: int = 16
    steps: int = 8
    rounds: int = 7
    """Of all variants in turn."""
    other_rows: tuple[int, ...] = (4, 8, 32, 64)
    """Of a micro-batch; a mini-batch keeps its rows."""
    product: int = 8192
    product_rounds: int = 5
    product_repeats: int = 20
    compiler: str = "inductor"


def paper_sizes() -> Sizes:
    """Returns T(6, 8192, 16) whole, and as many layers of T(64, 16384, 32) as a stage of the paper's K = 16 holds.

    A micro-batch is that of the experiments; a mini-batch has fewer of them, because a step of a check need not last.
    The rate is one that needs no warm-up.
    """
    small, large = t12_400m(), t128_6b()
    pipeline, time = large.pipeline, large.text.max_tokens
    return Sizes(
        whole=small.model,
        cell=large.model,
        cell_layers=2 * large.model.layers // pipeline.stages,
        optimizer=small.optimizer.model_copy(update={"learning_rate": 0.01}),
        rows=-(-large.train.batch_tokens // (pipeline.replicas * pipeline.micro_batches * time)),
        time=time,
        gradients=TransformerShape(2, 256, 512, 4, 1000, dropout=0.0),
    )


@dataclass(frozen=True)
class Work:
    """A whole pipeline of one stage: its layers on the meta device, and the mini-batch it trains on."""

    name: str
    layers: Sequence[nn.Module]
    loss: nn.Module
    micro_batches: int
    rows: Rows
    forward_flops: float
    """Of one micro-batch."""
    feed: Callable[[torch.device], list[MicroBatch]]
    """Makes the mini-batch's micro-batches; on the device what would come from another stage."""

    @property
    def tokens(self) -> int:
        """Target tokens of a step, or of a cell of encoder layers as many source tokens; none is padding."""
        return self.micro_batches * self.rows.count * self.rows.target

    @property
    def parameters(self) -> int:
        """Tied ones once."""
        return count_parameters(self.layers)

    def batch(self, device: torch.device) -> MiniBatch:
        """Returns the mini-batch; its loss is a mean over tokens."""
        made = self.feed(device)
        return MiniBatch([one.inputs for one in made], [one.targets for one in made], float(self.tokens))

    def cut(self, rows: int) -> Work:
        """Returns the same rows a step in micro-batches of ``rows``."""
        changed = replace(self.rows, count=rows)
        forward = self.forward_flops * rows / self.rows.count
        count = max(1, self.micro_batches * self.rows.count // rows)
        feed = _Feed(self.feed, self.rows.count, rows, count)
        return replace(self, rows=changed, forward_flops=forward, micro_batches=count, feed=feed)


@dataclass(frozen=True)
class _Feed:
    """Micro-batches joined, and cut again at another size."""

    feed: Callable[[torch.device], list[MicroBatch]]
    before: int
    rows: int
    count: int

    def __call__(self, device: torch.device) -> list[MicroBatch]:
        made = self.feed(device)
        inputs = [self._again(column) for column in zip(*(one.inputs for one in made), strict=True)]
        targets = [self._again(column) for column in zip(*(one.targets for one in made), strict=True)]
        return [
            MicroBatch(tuple(column[i] for column in inputs), tuple(column[i] for column in targets))
            for i in range(self.count)
        ]

    def _again(self, column: Sequence[Tensor]) -> list[Tensor]:
        carries = column[0].requires_grad
        whole = torch.cat([tensor.detach() for tensor in column])
        parts = whole.split(self.rows)  # type: ignore[no-untyped-call]
        return [part.clone().requires_grad_(carries) for part in parts]


def whole(sizes: Sizes) -> Work:
    """Returns a whole T(L, H, A) on one stage; ids come from the host, as in a run."""
    with torch.device("meta"):
        made, loss = layers(sizes.whole), TranslationLoss(sizes.whole.label_smoothing)
    rows = Rows(sizes.rows, sizes.time, sizes.time)
    vocabulary = sizes.whole.vocabulary

    def feed(device: torch.device) -> list[MicroBatch]:
        generator = torch.Generator().manual_seed(0)
        found = []
        for _ in range(sizes.micro_batches):
            source, target = (zipf(sizes.rows, sizes.time, vocabulary, generator) for _ in range(2))
            found.append(MicroBatch((source, target), (target.roll(-1, 1),)))
        return found

    flops = forward_flops(made, sizes.whole, rows)
    return Work(f"whole {title(sizes.whole)}", made, loss, sizes.micro_batches, rows, flops, feed)


def cell(sizes: Sizes, kind: type[EncoderLayer] | type[DecoderLayer]) -> Work:
    """Returns consecutive layers from the middle of a T(L, H, A), as a stage between two others holds them.

    What arrives is already on the device and carries gradients; the mask is all true, as full rows make it.
    """
    shape = sizes.cell
    with torch.device("meta"):
        made = [kind(shape) for _ in range(sizes.cell_layers)]
    rows = Rows(sizes.rows, sizes.time, sizes.time)

    def feed(device: torch.device) -> list[MicroBatch]:
        generator = torch.Generator(device).manual_seed(0)

        def arriving() -> Tensor:
            made = torch.randn(sizes.rows, sizes.time, shape.width, generator=generator, device=device)
            return made.requires_grad_()

        def one() -> MicroBatch:
            seen = torch.ones(sizes.rows, sizes.time, dtype=torch.bool, device=device)
            if kind is DecoderLayer:
                return MicroBatch((arriving(), arriving(), seen), ())
            ids = torch.ones(sizes.rows, sizes.time, dtype=torch.int64, device=device)  # passed on unread
            return MicroBatch((arriving(), seen, ids), ())

        return [one() for _ in range(sizes.micro_batches)]

    what = "encoder" if kind is EncoderLayer else "decoder"
    name = f"{len(made)} {what} layers of {title(shape)}"
    flops = forward_flops(made, shape, rows)
    return Work(name, made, MeanSquare(), sizes.micro_batches, rows, flops, feed)


def title(shape: TransformerShape) -> str:
    """Returns T(L, H, A)."""
    return f"T({shape.layers}, {shape.feed_forward}, {shape.heads})"


def zipf(rows: int, time: int, vocabulary: int, generator: torch.Generator) -> Tensor:
    """Returns (rows, time) int64 word ids, the n-th as frequent as 1/n: as in text, so that there is something to
    learn in a few steps."""
    words = max(1, vocabulary - FIRST_WORD)
    shares = 1.0 / torch.arange(1, words + 1)
    drawn = torch.multinomial(shares, rows * time, replacement=True, generator=generator)
    return (drawn + min(FIRST_WORD, vocabulary - 1)).view(rows, time)


class MeanSquare(nn.Module):
    """A loss for a cell that has no head: the mean square of what leaves each position, summed over positions. It needs
    no target, so it adds nothing to what a stage holds."""

    def forward(self, x: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
        """x (batch, time, width) -> (objective, measure), both scalars and equal."""
        objective = x.float().square().mean(-1).sum()
        return objective, objective.detach()
