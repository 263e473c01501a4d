"""The workload of a run on text. Its sample is real text if that is prepared, otherwise sentences of full length."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from experiments.base.workload import ExperimentWorkload, sample_shapes, update_key
from experiments.translation.experiment import TranslationExperiment
from suite.data.text.batching import TranslationBatches
from suite.data.text.splitting import VALID
from suite.data.text.subset import train_counts
from suite.data.text.text import TextData
from suite.pipeline.planning.profile import MicroBatch, Sample

FIRST_WORD = 4
"""The first token id of a word; lower ids are special tokens."""


@dataclass(frozen=True)
class Translation(ExperimentWorkload):
    """The workload of a multilingual run."""

    experiment: TranslationExperiment
    text: Path | None = None

    def with_experiment(self, experiment: TranslationExperiment) -> Translation:
        """Returns the workload of another experiment on the same text."""
        return Translation(experiment, self.text)

    @property
    def examples(self) -> int:
        """Sentences of full length; there are more if they are shorter."""
        return max(1, self.experiment.train.batch_tokens // self.experiment.text.max_length)

    @property
    def most_rows(self) -> int | None:
        """One target token per row is the least; a step with fewer rows has fewer micro-batches."""
        return self.experiment.train.batch_tokens

    def setting_errors(self) -> list[str]:
        """Also whether the prepared text has something to validate on."""
        errors = super().setting_errors()
        languages = self.experiment.text.languages
        if self.text is not None:
            train_counts(TextData.open(self.text), self.experiment.text)
        if self.text is not None and not _validation_pairs(self.text, languages):
            scope = f" in {', '.join(languages)}" if languages else ""
            errors.append(
                f"{self.experiment.data} has no validation pairs{scope}; add a validation file to it "
                "(docs/own-data.md), or use a larger corpus or other languages"
            )
        return errors

    def sample(self) -> Sample:
        """From the prepared text, if there is one."""
        return _longest_rows(self.experiment) if self.text is None else _from_text(self.experiment, self.text)

    def key(self) -> str:
        """The model, the shapes of the sample, and the update."""
        return repr((self.experiment.model, sample_shapes(self.sample()), update_key(self.optimizer)))

    def with_share(self, share: float) -> tuple[Translation, str]:
        """With fewer tokens per mini-batch."""
        setting = f"train.batch_tokens={max(16, int(self.batch * share))}"
        return self.with_settings(setting), setting


def random_ids(rows: int, time: int, vocabulary: int) -> Tensor:
    """Returns (rows, time) int64 word ids, always the same; costs do not depend on the words."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(min(FIRST_WORD, vocabulary - 1), vocabulary, (rows, time), generator=generator)


def _longest_rows(experiment: TranslationExperiment) -> Sample:
    """Returns sentences of full length with a micro-batch's tokens, which need the most bytes per token."""
    pipeline, time = experiment.pipeline, experiment.text.max_length
    rows = -(-experiment.train.batch_tokens // (pipeline.replicas * pipeline.micro_batches * time))
    ids = random_ids(rows, time, experiment.text.vocabulary)
    micro_batch = MicroBatch((ids, ids), (ids,))
    return Sample(micro_batch, micro_batch)


@lru_cache(maxsize=8)
def _validation_pairs(text: Path, languages: tuple[str, ...] | None) -> int:
    data = TextData.open(text)
    return sum(data.sizes[VALID][language] for language in data.drawn(languages))


@lru_cache(maxsize=8)
def _from_text(experiment: TranslationExperiment, text: Path) -> Sample:
    """Returns the micro-batches of mean and of largest size of the first mini-batches."""
    pipeline, train = experiment.pipeline, experiment.train
    # as one replica, which gets all micro-batches; with several, the first gets only the shortest sentences
    count = pipeline.replicas * pipeline.micro_batches
    batches = TranslationBatches(TextData.open(text), experiment.text, train, 1, count)
    parts: list[MicroBatch] = []
    for step in range(max(1, min(16, 50_000 // train.batch_tokens))):
        batch = batches.batch(step, 0)
        parts += [MicroBatch(i, t) for i, t in zip(batch.inputs, batch.targets, strict=True)]
    mean = sum(map(_padded_tokens, parts)) / len(parts)
    return Sample(min(parts, key=lambda part: abs(_padded_tokens(part) - mean)), max(parts, key=_padded_tokens))


def _padded_tokens(part: MicroBatch) -> int:
    """Returns the tokens of source and target, padding included."""
    return sum(tensor.numel() for tensor in part.inputs)
