"""What a plan asks of a run: its layers, micro-batches to measure with, and how it is piped and updated."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from experiments.experiment import Experiment
from suite.data.batching import TranslationBatches
from suite.data.text import TextData
from suite.pipeline.profile import MicroBatch, Sample
from suite.settings import OptimizerSettings, PipelineSettings

FIRST_WORD = 4
"""The first token id that is a word: padding, marks and the unknown come before it."""


class Measurable(Protocol):
    """What can be measured and run: enough to price its layers."""

    @property
    def name(self) -> str:
        """What it is asked for by."""

    @property
    def pipeline(self) -> PipelineSettings:
        """K, M, R, remat."""

    @property
    def optimizer(self) -> OptimizerSettings:
        """Decides the bytes that stand for each parameter, and the precision."""

    @property
    def threads(self) -> int | None:
        """Compute threads of a stage; None: the cores shared out."""

    def build(self) -> tuple[list[nn.Module], nn.Module]:
        """Returns the layers, on the meta device, and the loss."""

    def sample(self) -> Sample:
        """Returns micro-batches at this M and R."""

    def key(self) -> str:
        """Returns a text that is the same for works with the same layer costs: layers, sample, precision, optimizer."""


class Workload(Measurable, Protocol):
    """An experiment, or anything else that can be planned whole."""

    @property
    def examples(self) -> int:
        """Rows that a step surely has: what is suggested cuts it into no more."""

    @property
    def most_rows(self) -> int | None:
        """Rows that a step has at most: R x M cannot be more. None where that depends on the text."""

    @property
    def batch_tokens(self) -> int:
        """Tokens (or other things counted) of one step over all replicas."""

    @property
    def steps(self) -> int:
        """Steps of the whole run."""

    def with_pipeline(self, pipeline: PipelineSettings) -> Workload:
        """Returns the same work, piped otherwise."""

    def with_share(self, share: float) -> tuple[Workload, str]:
        """Returns the same work with that share of its mini-batch, and the setting that makes it so."""


@dataclass(frozen=True)
class Translation:
    """One of the multilingual runs. With its prepared text the sample is real; without, rows of longest sentences."""

    experiment: Experiment
    text: Path | None = None

    @property
    def name(self) -> str:
        """As in the registry."""
        return self.experiment.name

    @property
    def pipeline(self) -> PipelineSettings:
        """As set."""
        return self.experiment.pipeline

    @property
    def optimizer(self) -> OptimizerSettings:
        """As set."""
        return self.experiment.optimizer

    @property
    def examples(self) -> int:
        """Sentences of full length; shorter ones are more."""
        return max(1, self.experiment.train.batch_tokens // self.experiment.text.max_tokens)

    @property
    def most_rows(self) -> int | None:
        """It depends on the sentences drawn; a step that has fewer is cut into fewer."""
        return None

    @property
    def batch_tokens(self) -> int:
        """Target tokens."""
        return self.experiment.train.batch_tokens

    @property
    def steps(self) -> int:
        """As set."""
        return self.experiment.train.steps

    @property
    def threads(self) -> int | None:
        """As set."""
        return self.experiment.train.threads

    def build(self) -> tuple[list[nn.Module], nn.Module]:
        """The Transformer and its loss."""
        return self.experiment.build()

    def sample(self) -> Sample:
        """From the text where it is prepared."""
        return _longest_rows(self.experiment) if self.text is None else _from_text(self.experiment, self.text)

    def key(self) -> str:
        """The model, the shapes of the sample, and what there is to an update."""
        return repr((self.experiment.model, shapes(self.sample()), update_key(self.optimizer)))

    def with_pipeline(self, pipeline: PipelineSettings) -> Translation:
        """A copy."""
        return Translation(self.experiment.model_copy(update={"pipeline": pipeline}), self.text)

    def with_share(self, share: float) -> tuple[Translation, str]:
        """Fewer tokens a mini-batch."""
        setting = f"train.batch_tokens={max(16, int(self.batch_tokens * share))}"
        return Translation(self.experiment.with_settings(setting), self.text), setting


def shapes(sample: Sample) -> list[list[tuple[int, ...]]]:
    """Returns the shapes of a sample: costs depend on them, and not on the words."""
    return [[tuple(t.shape) for t in (*one.inputs, *one.targets)] for one in (sample.typical, sample.largest)]


def update_key(optimizer: OptimizerSettings) -> tuple[str, str, bool]:
    """Returns what costs depend on of an optimizer: not its rates."""
    return optimizer.name, optimizer.precision, optimizer.clip_norm is not None


def random_ids(rows: int, time: int, vocabulary: int) -> Tensor:
    """Returns (rows, time) int64 word ids, the same each time; costs do not depend on which words they are."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(min(FIRST_WORD, vocabulary - 1), vocabulary, (rows, time), generator=generator)


def _longest_rows(experiment: Experiment) -> Sample:
    """As many sentences of full length as hold a micro-batch's tokens: the most bytes a token."""
    pipeline, time = experiment.pipeline, experiment.text.max_tokens
    rows = -(-experiment.train.batch_tokens // (pipeline.replicas * pipeline.micro_batches * time))
    ids = random_ids(rows, time, experiment.text.vocabulary)
    one = MicroBatch((ids, ids), (ids,))
    return Sample(one, one)


@lru_cache(maxsize=8)
def _from_text(experiment: Experiment, text: Path) -> Sample:
    """Micro-batches of the first mini-batches: the one nearest to their mean size, and the largest."""
    pipeline, train = experiment.pipeline, experiment.train
    # as one replica, which gets them all: of several, the first gets the shortest sentences
    count = pipeline.replicas * pipeline.micro_batches
    batches = TranslationBatches(TextData.open(text), experiment.text, train, 1, count)
    found: list[MicroBatch] = []
    for step in range(max(1, min(16, 50_000 // train.batch_tokens))):
        batch = batches.batch(step, 0)
        found += [MicroBatch(i, t) for i, t in zip(batch.inputs, batch.targets, strict=True)]
    mean = sum(map(_places, found)) / len(found)
    return Sample(min(found, key=lambda one: abs(_places(one) - mean)), max(found, key=_places))


def _places(one: MicroBatch) -> int:
    """Padded places of source and target together."""
    return sum(tensor.numel() for tensor in one.inputs)
