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
from suite.pipeline.planning.flops import LayerFlops, count_flops
from suite.pipeline.planning.profile import MicroBatch
from suite.pipeline.schedule.config import ScheduleConfig
from suite.pipeline.schedule.remat import MAX_LIVE_GRAPHS
from suite.settings import OptimizerSettings, Remat

FIRST_WORD = 4
"""The first token id that is a word."""

REMAT: Remat = "except_last"
"""As in the paper: every micro-batch but the last is recomputed."""

SCHEDULE_CONFIG = ScheduleConfig(max_live_graphs=(MAX_LIVE_GRAPHS[REMAT],))


def recomputed(micro_batches: int) -> int:
    """Returns the number of micro-batches that are recomputed."""
    (actions,) = SCHEDULE_CONFIG.actions(1, micro_batches)
    return sum(action.kind == "R" for action in actions)


@dataclass(frozen=True)
class Sizes:
    """The sizes that decide how long the check takes; tests use small ones."""

    whole: TransformerShape
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
    steps: int = 8
    rounds: int = 7
    """Rounds over all variants."""
    other_rows: tuple[int, ...] = (4, 8, 32, 64)
    """Rows of a micro-batch in further variants; the mini-batch keeps its size."""
    product: int = 8192
    product_rounds: int = 5
    product_repeats: int = 20
    compiler: str = "inductor"


def paper_sizes() -> Sizes:
    """Returns a whole T(6, 8192, 16), and as many layers of T(64, 16384, 32) as a stage has at the paper's K = 16.

    A micro-batch is that of the experiments; a mini-batch has fewer of them to keep steps short. The learning rate
    needs no warm-up.
    """
    small, large = t12_400m(), t128_6b()
    pipeline, time = large.pipeline, large.text.max_length
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
class Rows:
    """A micro-batch of ``count`` pairs of ``source`` and ``target`` tokens."""

    count: int
    source: int
    target: int


@dataclass(frozen=True)
class SingleStageWorkload:
    """A pipeline of one stage: its layers on the meta device, and its mini-batch."""

    name: str
    layers: Sequence[nn.Module]
    loss: nn.Module
    micro_batches: int
    rows: Rows
    flops: LayerFlops
    """Operations of one micro-batch in all layers."""
    feed: Callable[[torch.device], list[MicroBatch]]
    """Makes the micro-batches; tensors that another stage would send are on the device."""

    @property
    def tokens(self) -> int:
        """Target tokens of a step, or source tokens for a cell of encoder layers; none is padding."""
        return self.micro_batches * self.rows.count * self.rows.target

    @property
    def parameters(self) -> int:
        """Number of parameters, tied ones once."""
        return count_parameters(self.layers)

    def batch(self, device: torch.device) -> MiniBatch:
        """Returns the mini-batch; its loss is a mean over tokens."""
        parts = self.feed(device)
        return MiniBatch([part.inputs for part in parts], [part.targets for part in parts], float(self.tokens))

    @property
    def model_flops(self) -> float:
        """Operations of a step, without recomputation."""
        return self.micro_batches * (self.flops.forward + self.flops.backward)

    @property
    def hardware_flops(self) -> float:
        """Operations of a step, with recomputation."""
        return self.model_flops + recomputed(self.micro_batches) * self.flops.forward

    def cut(self, rows: int) -> SingleStageWorkload:
        """Returns the same work in micro-batches of ``rows``."""
        count = max(1, self.micro_batches * self.rows.count // rows)

        def feed(device: torch.device) -> list[MicroBatch]:
            parts = self.feed(device)
            inputs = [_resplit(tensors, rows) for tensors in zip(*(part.inputs for part in parts), strict=True)]
            targets = [_resplit(tensors, rows) for tensors in zip(*(part.targets for part in parts), strict=True)]
            return [
                MicroBatch(tuple(tensors[i] for tensors in inputs), tuple(tensors[i] for tensors in targets))
                for i in range(count)
            ]

        share = rows / self.rows.count
        flops = LayerFlops(share * self.flops.forward, share * self.flops.backward)
        return replace(self, rows=replace(self.rows, count=rows), flops=flops, micro_batches=count, feed=feed)


def _resplit(tensors: Sequence[Tensor], rows: int) -> list[Tensor]:
    joined = torch.cat([tensor.detach() for tensor in tensors])
    parts = joined.split(rows)  # type: ignore[no-untyped-call]
    return [part.clone().requires_grad_(tensors[0].requires_grad) for part in parts]


def full_model_workload(sizes: Sizes) -> SingleStageWorkload:
    """Returns a whole T(L, H, A) on one stage; token ids come from the host, as in a run."""
    with torch.device("meta"):
        made, loss = layers(sizes.whole), TranslationLoss(sizes.whole.label_smoothing)
    rows = Rows(sizes.rows, sizes.time, sizes.time)
    vocabulary = sizes.whole.vocabulary

    def feed(device: torch.device) -> list[MicroBatch]:
        generator = torch.Generator().manual_seed(0)
        parts = []
        for _ in range(sizes.micro_batches):
            source, target = (zipf(sizes.rows, sizes.time, vocabulary, generator) for _ in range(2))
            parts.append(MicroBatch((source, target), (target.roll(-1, 1),)))
        return parts

    ids = torch.empty(sizes.rows, sizes.time, dtype=torch.int64, device="meta")
    flops = _sum(count_flops(made, loss, (ids, ids), (ids,)))
    return SingleStageWorkload(f"whole {title(sizes.whole)}", made, loss, sizes.micro_batches, rows, flops, feed)


def cell_workload(sizes: Sizes, kind: type[EncoderLayer] | type[DecoderLayer]) -> SingleStageWorkload:
    """Returns consecutive layers from the middle of a T(L, H, A), as on a stage between two others.

    Inputs are on the device and require gradients; each row is one sentence without padding.
    """
    shape = sizes.cell
    with torch.device("meta"):
        made = [kind(shape) for _ in range(sizes.cell_layers)]
    rows = Rows(sizes.rows, sizes.time, sizes.time)

    def sentence_of(places: int, device: torch.device) -> Tensor:
        return torch.ones(sizes.rows, places, dtype=torch.int32, device=device)

    def feed(device: torch.device) -> list[MicroBatch]:
        generator = torch.Generator(device).manual_seed(0)

        def make_input() -> Tensor:
            made = torch.randn(sizes.rows, sizes.time, shape.width, generator=generator, device=device)
            return made.requires_grad_()

        def make_micro_batch() -> MicroBatch:
            if kind is DecoderLayer:
                return MicroBatch((make_input(), make_input(), sentence_of(2 * sizes.time, device)), ())
            ids = torch.ones(sizes.rows, sizes.time, dtype=torch.int64, device=device)  # passed on unread
            return MicroBatch((make_input(), sentence_of(sizes.time, device), ids), ())

        return [make_micro_batch() for _ in range(sizes.micro_batches)]

    what = "encoder" if kind is EncoderLayer else "decoder"
    name = f"{len(made)} {what} layers of {title(shape)}"
    x, ids = torch.empty(sizes.rows, sizes.time, shape.width, device="meta", requires_grad=True), torch.empty(0)
    meta = torch.device("meta")
    inputs = (
        (x, x, sentence_of(2 * sizes.time, meta)) if kind is DecoderLayer else (x, sentence_of(sizes.time, meta), ids)
    )
    flops = _sum(count_flops(made, MeanSquare(), inputs, ()))
    return SingleStageWorkload(name, made, MeanSquare(), sizes.micro_batches, rows, flops, feed)


def _sum(layers: Sequence[LayerFlops]) -> LayerFlops:
    return LayerFlops(sum(layer.forward for layer in layers), sum(layer.backward for layer in layers))


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
