"""A run on text as the plan sees it: with its prepared text the sample is real; without, rows of longest sentences."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from experiments.text_experiment import TranslationExperiment
from experiments.workload import OfExperiment, shapes, update_key
from suite.data.batching import TranslationBatches
from suite.data.text import TextData
from suite.pipeline.profile import MicroBatch, Sample

FIRST_WORD = 4
"""The first token id that is a word: padding, marks and the unknown come before it."""


@dataclass(frozen=True)
class Translation(OfExperiment):
    """One of the multilingual runs."""

    experiment: TranslationExperiment
    text: Path | None = None

    def remade(self, experiment: TranslationExperiment) -> Translation:
        """On the same text."""
        return Translation(experiment, self.text)

    @property
    def examples(self) -> int:
        """Sentences of full length; shorter ones are more."""
        return max(1, self.experiment.train.batch_tokens // self.experiment.text.max_tokens)

    @property
    def most_rows(self) -> int | None:
        """Each has a target token at the least; a step that has fewer rows is cut into fewer."""
        return self.experiment.train.batch_tokens

    def sample(self) -> Sample:
        """From the text where it is prepared."""
        return _longest_rows(self.experiment) if self.text is None else _from_text(self.experiment, self.text)

    def key(self) -> str:
        """The model, the shapes of the sample, and what there is to an update."""
        return repr((self.experiment.model, shapes(self.sample()), update_key(self.optimizer)))

    def with_share(self, share: float) -> tuple[Translation, str]:
        """Fewer tokens a mini-batch."""
        setting = f"train.batch_tokens={max(16, int(self.batch * share))}"
        return self.remade(self.experiment.with_settings(setting)), setting


def random_ids(rows: int, time: int, vocabulary: int) -> Tensor:
    """Returns (rows, time) int64 word ids, the same each time; costs do not depend on which words they are."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(min(FIRST_WORD, vocabulary - 1), vocabulary, (rows, time), generator=generator)


def _longest_rows(experiment: TranslationExperiment) -> Sample:
    """As many sentences of full length as hold a micro-batch's tokens: the most bytes a token."""
    pipeline, time = experiment.pipeline, experiment.text.max_tokens
    rows = -(-experiment.train.batch_tokens // (pipeline.replicas * pipeline.micro_batches * time))
    ids = random_ids(rows, time, experiment.text.vocabulary)
    one = MicroBatch((ids, ids), (ids,))
    return Sample(one, one)


@lru_cache(maxsize=8)
def _from_text(experiment: TranslationExperiment, text: Path) -> Sample:
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
