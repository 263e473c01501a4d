"""The timed workloads: a list of layers, a loss and one mini-batch, equal for all entrants."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from experiments.base.workload import SingleThreadWorkload, random_ids
from models.language_model import Block, LanguageModelShape
from models.loss import TranslationLoss
from models.synthetic import SyntheticLayer
from models.transformer import TransformerShape
from models.transformer import layers as transformer_layers
from suite.pipeline.model.layers import Tensors
from suite.pipeline.model.microbatch import MiniBatch, split
from suite.pipeline.planning.profile import MicroBatch, Sample
from suite.settings import PipelineSettings

SEED = 11
"""Seed of the initial weights, equal for all entrants."""


@dataclass(frozen=True)
class BenchWorkload(SingleThreadWorkload, ABC):
    """One mini-batch through one model with K stages, M micro-batches per replica and R replicas."""

    stages: int
    micro_batches: int
    replicas: int = 1

    @property
    @abstractmethod
    def name(self) -> str:
        """Name of the benchmark."""

    @abstractmethod
    def build(self) -> tuple[list[nn.Module], nn.Module]:
        """Returns the layers, on the meta device, and the loss."""

    @abstractmethod
    def full_batch(self) -> tuple[Tensors, Tensor]:
        """Returns inputs and targets of the mini-batch of all replicas, (rows, ...) each, the same in every process."""

    @abstractmethod
    def weight(self) -> float:
        """Returns the divisor of the summed loss of the whole mini-batch."""

    @property
    def pipeline(self) -> PipelineSettings:
        """K, M and R; entrants choose the other settings."""
        return PipelineSettings(stages=self.stages, micro_batches=self.micro_batches, replicas=self.replicas)

    @property
    def measuring_processes(self) -> int:
        """Number of processes that measure its layers concurrently: as many as compute concurrently."""
        return self.stages * self.replicas

    def share(self, replica: int) -> tuple[Tensors, Tensor]:
        """Returns one replica's inputs and targets, (rows, ...) each, as views."""
        inputs, targets = self.full_batch()
        rows = targets.shape[0] // self.replicas
        part = slice(replica * rows, (replica + 1) * rows)
        return tuple(tensor[part] for tensor in inputs), targets[part]

    def mini_batch(self, replica: int) -> MiniBatch:
        """Returns one replica's share, split into M equal micro-batches."""
        inputs, targets = self.share(replica)
        count = self.micro_batches
        return MiniBatch(split(inputs, count), split([targets], count), self.weight(), replica * count)

    def sample(self) -> Sample:
        """One micro-batch; all have one size."""
        batch = self.mini_batch(0)
        first = MicroBatch(batch.inputs[0], batch.targets[0])
        return Sample(first, first)

    @property
    def rows(self) -> int:
        """Rows of the mini-batch of all replicas."""
        return self.micro_batch_rows * self.micro_batches * self.replicas

    @property
    @abstractmethod
    def micro_batch_rows(self) -> int:
        """Rows of a micro-batch."""


PARTS = 2
"""Sleeping layers per stage, so that schedules with several stages per process can divide a stage."""


@dataclass(frozen=True)
class SyntheticWork(BenchWorkload):
    """2K layers that sleep: a stage sleeps F forward and F for each of the two gradients, so B = 2F."""

    forward_s: float = 0.020
    parameters: int = PARTS
    """Parameters of a stage."""
    shape: tuple[int, ...] = (4, 128, 128)
    """Shape of a message, in fp32: 256 KiB. Larger ones would keep two cores busy with copies at K = 16."""

    @property
    def name(self) -> str:
        """``sleeping``, or ``replicas`` if there are several."""
        return "sleeping" if self.replicas == 1 else "replicas"

    def build(self) -> tuple[list[nn.Module], nn.Module]:
        """Layers with equal times and a squared error."""
        sleep_s, parameters = self.forward_s / PARTS, self.parameters // PARTS
        with torch.device("meta"):
            return [
                SyntheticLayer(sleep_s, sleep_s, sleep_s, parameters) for _ in range(PARTS * self.stages)
            ], SquareError()  # fmt: skip

    def full_batch(self) -> tuple[Tensors, Tensor]:
        """Random numbers."""
        return (_normal(0, self.rows, *self.shape[1:]),), _normal(1, self.rows, 1, 1)

    def weight(self) -> float:
        """The number of values."""
        return float(self.rows * self.shape[1] * self.shape[2])

    @property
    def measuring_processes(self) -> int:
        """One, because sleeping processes do not slow each other down."""
        return 1

    @property
    def micro_batch_rows(self) -> int:
        """Rows of a message."""
        return self.shape[0]


@dataclass(frozen=True)
class OverheadWork(BenchWorkload):
    """2K layers of one weight each, over one number: a step takes only what the pipeline itself does."""

    @property
    def name(self) -> str:
        """``overhead``."""
        return "overhead"

    def build(self) -> tuple[list[nn.Module], nn.Module]:
        """Products of 1 x 1 and a squared error."""
        with torch.device("meta"):
            return [nn.Linear(1, 1, bias=False) for _ in range(PARTS * self.stages)], SquareError()

    def full_batch(self) -> tuple[Tensors, Tensor]:
        """Random numbers."""
        return (_normal(0, self.rows, 1),), _normal(1, self.rows, 1)

    def weight(self) -> float:
        """The number of values."""
        return float(self.rows)

    @property
    def micro_batch_rows(self) -> int:
        """One."""
        return 1


@dataclass(frozen=True)
class LanguageModelWork(BenchWorkload):
    """Blocks of the language model, without embedding and head: equal layers, one tensor between them."""

    layers: int = 8
    width: int = 512
    feed_forward: int = 2048
    heads: int = 8
    time: int = 128
    each: int = 1

    @property
    def name(self) -> str:
        """``layers``."""
        return "layers"

    def build(self) -> tuple[list[nn.Module], nn.Module]:
        """Causal blocks and a squared error."""
        shape = LanguageModelShape(self.layers, self.width, self.feed_forward, self.heads, vocabulary=2, time=self.time)
        with torch.device("meta"):
            return [Block(shape) for _ in range(self.layers)], SquareError()

    def full_batch(self) -> tuple[Tensors, Tensor]:
        """Random numbers."""
        size = (self.rows, self.time, self.width)
        return (_normal(0, *size),), _normal(1, *size)

    def weight(self) -> float:
        """The number of values."""
        return float(self.rows * self.time * self.width)

    @property
    def micro_batch_rows(self) -> int:
        """As set."""
        return self.each


@dataclass(frozen=True)
class TranslationWork(BenchWorkload):
    """The encoder-decoder T(L, H, A): different layers, and ids beside activations between them."""

    layers: int = 4
    width: int = 192
    feed_forward: int = 768
    heads: int = 3
    vocabulary: int = 4000
    time: int = 32
    each: int = 8

    @property
    def name(self) -> str:
        """``translation``."""
        return "translation"

    def build(self) -> tuple[list[nn.Module], nn.Module]:
        """The model without dropout, whose masks differ between engines, and without ties, because not every peer sums
        the gradients of a matrix that two stages share."""
        shape = TransformerShape(
            self.layers, self.width, self.feed_forward, self.heads, self.vocabulary, dropout=0.0, label_smoothing=0.1
        )
        with torch.device("meta"):
            layers = transformer_layers(shape)
        for layer in layers:
            layer.tied = {}  # type: ignore[assignment]
        return layers, TranslationLoss(shape.label_smoothing)

    def full_batch(self) -> tuple[Tensors, Tensor]:
        """Random words without padding, so that all micro-batches take the same time."""
        ids = random_ids(3 * self.rows, self.time, self.vocabulary)
        return (ids[: self.rows], ids[self.rows : 2 * self.rows]), ids[2 * self.rows :]

    def weight(self) -> float:
        """The number of target tokens."""
        return float(self.rows * self.time)

    @property
    def micro_batch_rows(self) -> int:
        """As set."""
        return self.each


class SquareError(nn.Module):
    """Sums squared differences from the target."""

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """x and target of any shapes that broadcast -> (objective, measure)."""
        objective = (x - target).square().sum()
        return objective, objective.detach()


def _normal(seed: int, *size: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))
