"""The workloads of the GPU check: a whole T(L, H, A) or a cell of one, on synthetic micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from experiments.translation.runs import t12_400m, t128_6b
from models.loss import TranslationLoss
from models.shape import TransformerShape
from models.transformer import DecoderLayer, EncoderLayer, layers
from suite.pipeline.model.layers import count_parameters
from suite.pipeline.model.microbatch import MiniBatch
from suite.pipeline.planning.flops import StepFlops, count_flops, step_flops
from suite.pipeline.planning.profile import MicroBatch
from suite.pipeline.schedule.config import ScheduleConfig
from suite.pipeline.schedule.remat import MAX_LIVE_GRAPHS
from suite.settings import OptimizerSettings, Remat

FIRST_WORD = 4
"""The first token id that is a word."""

REMAT: Remat = "except_last"
"""As in the paper: every micro-batch but the last is recomputed."""

SCHEDULE_CONFIG = ScheduleConfig(max_live_graphs=(MAX_LIVE_GRAPHS[REMAT],))


class SkippedError(Exception):
    """A part cannot run here, for the reason given."""


@dataclass(frozen=True)
class Sizes:
    """The sizes that decide how long the check takes."""

    full: TransformerShape
    cell: TransformerShape
    cell_layers: int
    optimizer: OptimizerSettings
    rows: int
    time: int
    """Tokens a row, in source and target, without padding."""
    gradients: TransformerShape
    gradient_rows: int = 8
    gradient_time: int = 16
    gradient_micro_batches: int = 4
    micro_batches: int = 16
    large_tokens: int = 8192
    """Tokens of the large micro-batch; the mini-batch keeps its size."""
    steps: int = 8
    product: int = 8192
    product_rounds: int = 5
    product_repeats: int = 20


def paper_sizes() -> Sizes:
    """Returns a whole T(6, 8192, 16), and as many layers of T(64, 16384, 32) as a stage has at the paper's K = 16.

    A micro-batch is that of the experiments; a mini-batch has fewer of them to keep steps short. The learning rate
    needs no warm-up.
    """
    small, large = t12_400m(), t128_6b()
    pipeline, time = large.pipeline, large.text.max_length
    return Sizes(
        full=small.model,
        cell=large.model,
        cell_layers=2 * large.model.layers // pipeline.stages,
        optimizer=small.optimizer.model_copy(update={"learning_rate": 0.01}),
        rows=-(-large.train.batch_tokens // (pipeline.replicas * pipeline.micro_batches * time)),
        time=time,
        gradients=TransformerShape(2, 256, 512, 4, 1000, dropout=0.0),
    )


def cpu_sizes() -> Sizes:
    """Returns the same parts at a size for two cores."""
    narrow = TransformerShape(2, 128, 512, 4, 1000, head_width=32)
    return replace(
        paper_sizes(), full=narrow, cell=narrow, cell_layers=2, rows=4, time=32, micro_batches=8, large_tokens=512,
        gradients=TransformerShape(1, 64, 128, 4, 200, dropout=0.0), steps=4, product=1024, product_repeats=2,
    )  # fmt: skip


@dataclass(frozen=True)
class Workload:
    """A pipeline of one stage: its layers on the meta device, and its mini-batch of M x rows x time tokens."""

    name: str
    layers: Sequence[nn.Module]
    loss: nn.Module
    micro_batches: int
    rows: int
    time: int
    feed: Callable[[torch.device], MicroBatch]
    """Makes a micro-batch; tensors that another stage would send are on the device."""

    @property
    def tokens(self) -> int:
        """Target tokens of a step, or source tokens for a cell of encoder layers; none is padding."""
        return self.micro_batches * self.rows * self.time

    @property
    def parameters(self) -> int:
        """Number of parameters, tied ones once."""
        return count_parameters(self.layers)

    def batch(self, device: torch.device) -> MiniBatch:
        """Returns the mini-batch; its loss is a mean over tokens."""
        parts = [self.feed(device) for _ in range(self.micro_batches)]
        return MiniBatch([part.inputs for part in parts], [part.targets for part in parts], float(self.tokens))

    def flops(self) -> StepFlops:
        """Returns the operations of a whole step."""
        example = self.feed(torch.device("cpu"))
        counts = count_flops(self.layers, self.loss, example.inputs, example.targets)
        return step_flops(counts, [len(counts)], SCHEDULE_CONFIG, 1, self.micro_batches, 1 / self.micro_batches)


def full_model_workload(sizes: Sizes) -> Workload:
    """Returns a whole T(L, H, A) on one stage; token ids come from the host, as in a run."""
    with torch.device("meta"):
        made, loss = layers(sizes.full), TranslationLoss(sizes.full.label_smoothing)
    generator = torch.Generator().manual_seed(0)

    def feed(device: torch.device) -> MicroBatch:
        source, target = (zipf(sizes.rows, sizes.time, sizes.full.vocabulary, generator) for _ in range(2))
        return MicroBatch((source, target), (target.roll(-1, 1),))

    return Workload(f"whole {title(sizes.full)}", made, loss, sizes.micro_batches, sizes.rows, sizes.time, feed)


def cell_workload(sizes: Sizes, kind: type[EncoderLayer] | type[DecoderLayer], rows: int = 0) -> Workload:
    """Returns consecutive layers from the middle of a T(L, H, A), as on a stage between two others.

    Inputs are on the device and require gradients; each row is one sentence without padding. ``rows`` cuts the same
    mini-batch into other micro-batches.
    """
    shape, time, rows = sizes.cell, sizes.time, rows or sizes.rows
    micro_batches = max(1, sizes.micro_batches * sizes.rows // rows)
    dtype = torch.bfloat16 if sizes.optimizer.precision == "bf16" else torch.float32  # as other stages send them
    with torch.device("meta"):
        made = [kind(shape) for _ in range(sizes.cell_layers)]

    def feed(device: torch.device) -> MicroBatch:
        def activations() -> Tensor:
            return torch.randn(rows, time, shape.width, dtype=dtype, device=device).requires_grad_()

        def sentence_of(places: int) -> Tensor:
            return torch.ones(rows, places, dtype=torch.int32, device=device)

        if kind is DecoderLayer:
            return MicroBatch((activations(), activations(), sentence_of(2 * time)), ())
        return MicroBatch((activations(), sentence_of(time), sentence_of(time).long()), ())  # ids are passed on unread

    what = "encoder" if kind is EncoderLayer else "decoder"
    name = f"{len(made)} {what} layers of {title(shape)}"
    return Workload(name, made, MeanSquare(), micro_batches, rows, time, feed)


def title(shape: TransformerShape) -> str:
    """Returns T(L, H, A)."""
    return f"T({shape.layers}, {shape.feed_forward}, {shape.heads})"


def zipf(rows: int, time: int, vocabulary: int, generator: torch.Generator) -> Tensor:
    """Returns (rows, time) int64 word ids, the n-th with a frequency proportional to 1/n as in text, so that a model
    learns something in a few steps."""
    words = max(1, vocabulary - FIRST_WORD)
    shares = 1.0 / torch.arange(1, words + 1)
    samples = torch.multinomial(shares, rows * time, replacement=True, generator=generator)
    return (samples + min(FIRST_WORD, vocabulary - 1)).view(rows, time)


class MeanSquare(nn.Module):
    """A loss for a cell without a head: the mean square of each position's output, summed over positions. It needs no
    targets, so it adds no memory."""

    def forward(self, x: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
        """x (batch, time, width) -> (objective, measure), both scalars and equal."""
        objective = x.float().square().mean(-1).sum()
        return objective, objective.detach()
