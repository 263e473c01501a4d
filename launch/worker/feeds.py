"""Sources of a worker's mini-batches: text or images, read only on the stages that need them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

from experiments.base.experiment import Experiment
from experiments.images.experiment import ImageExperiment
from experiments.translation.experiment import TranslationExperiment
from suite.data.images.batches import ImageBatches
from suite.data.images.transforms import ImageData
from suite.data.text.batching import TranslationBatches
from suite.data.text.text import TextData
from suite.errors import DataError
from suite.evaluation.unigram import unigram_entropy
from suite.pipeline.model.microbatch import MiniBatch
from suite.pipeline.model.topology import RankCoord

HeldOut = Sequence[MiniBatch] | Sequence[None]
"""Held-out mini-batches on the stages that need them; a list of None with the same length on all others."""


class DataSource(Protocol):
    """Mini-batches for the stages that need them, None for all others."""

    def batch(self, step: int) -> MiniBatch | None:
        """Returns this worker's share of a step."""

    def held_out(self) -> HeldOut:
        """Returns the held-out mini-batches, the same number on every stage. All workers must call it."""

    def notes(self) -> dict[str, Any]:
        """Returns the description of the data that checkpoints store."""

    def counts(self) -> dict[str, int]:
        """Returns the number of examples of each split. Call it on the last stage only."""

    def check(self, notes: dict[str, Any]) -> None:
        """Raises DataError when a checkpoint was trained on other data."""

    def baseline(self, held_out: HeldOut) -> float:
        """Returns the baseline score, without a model, on the held-out mini-batches. Call it on the last stage only."""


def data_source(experiment: Experiment, data: Path, coord: RankCoord) -> DataSource:
    """Returns the data source of an experiment's task."""
    if isinstance(experiment, TranslationExperiment):
        return TextSource(experiment, data, coord)
    assert isinstance(experiment, ImageExperiment), type(experiment)
    return ImageSource(experiment, data, coord)


class TextSource:
    """Sentence pairs."""

    def __init__(self, experiment: TranslationExperiment, data: Path, coord: RankCoord) -> None:
        self._coord, self._train, self._pipeline = coord, experiment.train, experiment.pipeline
        self._batches: TranslationBatches | None = None
        self._vocabulary: str | None = None
        self._data: TextData | None = None
        if coord.is_first or coord.is_last:
            pipeline = experiment.pipeline
            self._data = TextData.open(data)
            self._vocabulary = self._data.digest
            self._batches = TranslationBatches(
                self._data, experiment.text, experiment.train, pipeline.replicas, pipeline.micro_batches
            )

    def batch(self, step: int) -> MiniBatch | None:
        """Source and target ids."""
        return self._batches.batch(step, self._coord.replica) if self._batches is not None else None

    def held_out(self) -> HeldOut:
        """A fixed sample of pairs."""
        batches = None
        if self._batches is not None:
            batches = self._batches.held_out(self._train.valid_pairs, self._pipeline.micro_batches)
        return _as_many(batches)

    def notes(self) -> dict[str, Any]:
        """The vocabulary."""
        return {"vocabulary": self._vocabulary}

    def counts(self) -> dict[str, int]:
        """Pairs, over all languages."""
        assert self._data is not None
        return {split: sum(sizes) for split, sizes in self._data.sizes.items()}

    def check(self, notes: dict[str, Any]) -> None:
        """Compares vocabularies: with another one, ids would stand for other words."""
        if notes and self._vocabulary not in (None, notes.get("vocabulary")):
            raise DataError(
                "the checkpoint was trained with a different vocabulary than the prepared text, so its ids would stand "
                "for other words; start a new run, or restore the cache that the run was trained with"
            )

    def baseline(self, held_out: HeldOut) -> float:
        """The unigram entropy of the same tokens."""
        return unigram_entropy(target for batch in held_out if batch for (target,) in batch.targets)


class ImageSource:
    """Images for the first stage, labels for the last."""

    def __init__(self, experiment: ImageExperiment, data: Path, coord: RankCoord) -> None:
        self._coord = coord
        self._data: ImageData | None = None
        self._batches: ImageBatches | None = None
        if coord.is_first or coord.is_last:
            pipeline = experiment.pipeline
            self._data = ImageData.open(data)
            self._batches = ImageBatches(
                self._data, experiment.images, experiment.train, pipeline.replicas, pipeline.micro_batches
            )

    def batch(self, step: int) -> MiniBatch | None:
        """Reads images only on the first stage."""
        if self._batches is None:
            return None
        return self._batches.batch(step, self._coord.replica, images=self._coord.is_first)

    def held_out(self) -> HeldOut:
        """The test images."""
        return _as_many(None if self._batches is None else self._batches.held_out(images=self._coord.is_first))

    def notes(self) -> dict[str, Any]:
        """The image set, which determines the classes."""
        return {"images": self._data.facts.source if self._data is not None else None}

    def counts(self) -> dict[str, int]:
        """Images of each split."""
        assert self._data is not None
        return self._data.facts.counts

    def check(self, notes: dict[str, Any]) -> None:
        """Compares image sets: another one has other classes."""
        if notes and self._data is not None and notes.get("images") != self._data.facts.source:
            raise DataError(
                f"the checkpoint was trained on {notes.get('images')}, not on {self._data.facts.source}; "
                "start a new run"
            )

    def baseline(self, held_out: HeldOut) -> float:
        """The share of the most frequent class."""
        assert self._data is not None
        return max(self._data.facts.shares)


def _as_many(batches: Sequence[MiniBatch] | None) -> HeldOut:
    """Returns the mini-batches, or a list of None with the length of the first stage's list."""
    count: list[Any] = [len(batches) if batches is not None else None]
    dist.broadcast_object_list(count, src=0)
    return batches if batches is not None else [None] * int(count[0])
