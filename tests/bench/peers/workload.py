"""The timed workloads: a list of layers, a loss and one mini-batch, equal for all entrants."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from experiments.base.workload import SingleThreadWorkload, random_ids
from experiments.tables.sleeping import SquareError, SyntheticLayer
from models.language_model import Block, LanguageModelShape
from models.loss import TranslationLoss
from models.transformer import TransformerShape
from models.transformer import layers as transformer_layers
from suite.pipeline.model.layers import Tensors, meta_device
from suite.pipeline.model.microbatch import ReplicaBatch
from suite.pipeline.planning.sample import MicroBatch, Sample
from suite.settings import PipelineSettings
from tests.micro_batches import split

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

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Shape of a micro-batch's input, rows first."""

    @abstractmethod
    def build(self) -> tuple[list[nn.Module], nn.Module]:
        """Returns the layers, on the meta device, and the loss."""

    def full_batch(self) -> tuple[Tensors, Tensor]:
        """Returns inputs and targets of the mini-batch of all replicas, (rows, ...) each, the same in every process:
        random numbers."""
        return (_normal(0, self.rows, *self.shape[1:]),), _normal(1, self.rows, *self.shape[1:])

    @property
    def divisor(self) -> float:
        """The divisor of the summed loss of the whole mini-batch: its number of values or words."""
        return float(self.rows * prod(self.shape[1:]))

    @property
    def rows(self) -> int:
        return self.shape[0] * self.micro_batches * self.replicas

    @property
    def pipeline(self) -> PipelineSettings:
        """K, M and R; entrants choose the other settings."""
        return PipelineSettings(stages=self.stages, micro_batches=self.micro_batches, replicas=self.replicas)

    def share(self, replica: int) -> tuple[Tensors, Tensor]:
        inputs, targets = self.full_batch()
        rows = targets.shape[0] // self.replicas
        part = slice(replica * rows, (replica + 1) * rows)
        return tuple(tensor[part] for tensor in inputs), targets[part]

    def split(self, inputs: Tensors, targets: Tensor, replica: int) -> ReplicaBatch:
        count = self.micro_batches
        return ReplicaBatch(split(inputs, count), split([targets], count), self.divisor, replica * count)

    def sample(self) -> Sample:
        """One micro-batch; all have one size."""
        batch = self.split(*self.share(0), replica=0)
        first = MicroBatch(batch.inputs[0], batch.targets[0])
        return Sample(first, first)


PARTS = 2
"""Layers per stage, so that schedules with several stages per process can divide a stage."""


@dataclass(frozen=True)
class SyntheticWork(BenchWorkload):
    """2K layers that sleep: a stage sleeps F forward and F for each of the two gradients, so B = 2F."""

    forward_s: float = 0.020
    parameters: int = PARTS
    """Parameters of a stage."""
    shape: tuple[int, ...] = (4, 128, 128)
    """In fp32 256 KiB. Larger messages would keep two cores busy with copies at K = 16."""

    @property
    def name(self) -> str:
        return "sleeping" if self.replicas == 1 else "replicas"

    def build(self) -> tuple[list[nn.Module], nn.Module]:
        times, parameters = (self.forward_s / PARTS,) * 3, self.parameters // PARTS
        with meta_device():
            return [SyntheticLayer(*times, parameters) for _ in range(PARTS * self.stages)], SquareError()

    def full_batch(self) -> tuple[Tensors, Tensor]:
        return (_normal(0, self.rows, *self.shape[1:]),), _normal(1, self.rows, 1, 1)


@dataclass(frozen=True)
class OverheadWork(BenchWorkload):
    """2K layers of one weight each, over one number: a step takes only what the pipeline itself does."""

    name = "overhead"
    shape: tuple[int, ...] = (1, 1)

    def build(self) -> tuple[list[nn.Module], nn.Module]:
        with meta_device():
            return [nn.Linear(1, 1, bias=False) for _ in range(PARTS * self.stages)], SquareError()


@dataclass(frozen=True)
class LanguageModelWork(BenchWorkload):
    """Eight blocks of the language model, without embedding and head: equal layers, one tensor between them."""

    name = "layers"
    shape: tuple[int, ...] = (1, 128, 512)

    def build(self) -> tuple[list[nn.Module], nn.Module]:
        _, time, width = self.shape
        shape = LanguageModelShape(8, width, 4 * width, heads=8, vocabulary=2, context_length=time)
        with meta_device():
            return [Block(shape) for _ in range(shape.blocks_per_stack)], SquareError()


T4 = TransformerShape(4, 192, 768, 3, 4000, dropout=0.0, label_smoothing=0.1)
"""Without dropout, whose masks differ between engines."""


@dataclass(frozen=True)
class TranslationWork(BenchWorkload):
    """The encoder-decoder T(L, H, A): different layers, and ids beside activations between them."""

    name = "translation"
    model: TransformerShape = T4
    shape: tuple[int, ...] = (8, 32)

    def build(self) -> tuple[list[nn.Module], nn.Module]:
        """The model without ties, because not every peer sums the gradients of a matrix that two stages share."""
        with meta_device():
            layers = transformer_layers(self.model)
        for layer in layers:
            layer.gpipe_ties = {}  # type: ignore[assignment]
        return layers, TranslationLoss(self.model.label_smoothing)

    def full_batch(self) -> tuple[Tensors, Tensor]:
        """Random words without padding, so that all micro-batches take the same time."""
        ids = random_ids(3 * self.rows, self.shape[1], self.model.vocabulary)
        return (ids[: self.rows], ids[self.rows : 2 * self.rows]), ids[2 * self.rows :]


def _normal(seed: int, *size: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))
