"""Where a worker's mini-batches come from: text or images, read only by the stages that need them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

from experiments.experiment import Experiment
from experiments.image_experiment import ImageExperiment
from experiments.text_experiment import TranslationExperiment
from suite.data.batching import TranslationBatches
from suite.data.image_batches import ImageBatches
from suite.data.images import ImageData
from suite.data.text import TextData
from suite.errors import DataError
from suite.evaluation.unigram import unigram_entropy
from suite.pipeline.microbatch import MiniBatch
from suite.pipeline.topology import Place

HeldOut = Sequence[MiniBatch] | Sequence[None]
"""Held-out mini-batches on the stages that need them, as many times None on those between."""


class Feed(Protocol):
    """Mini-batches for the stages that need them, None for those between."""

    def batch(self, step: int) -> MiniBatch | None:
        """Returns this worker's share of a step."""

    def held_out(self) -> HeldOut:
        """Returns as many held-out mini-batches on every stage. All workers must call it."""

    def notes(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps of the data."""

    def counts(self) -> dict[str, int]:
        """Returns the examples of each split; on the last stage."""

    def check(self, notes: dict[str, Any]) -> None:
        """Raises DataError when a checkpoint was trained on data that this is not."""

    def baseline(self, held_out: HeldOut) -> float:
        """Returns the measure that takes no model, on the held-out mini-batches; the last stage may ask."""


def feed_of(experiment: Experiment, data: Path, place: Place) -> Feed:
    """Returns the feed of an experiment's task."""
    if isinstance(experiment, TranslationExperiment):
        return TextFeed(experiment, data, place)
    assert isinstance(experiment, ImageExperiment), type(experiment)
    return ImageFeed(experiment, data, place)


class TextFeed:
    """Pairs of sentences."""

    def __init__(self, experiment: TranslationExperiment, data: Path, place: Place) -> None:
        self._place, self._train, self._pipeline = place, experiment.train, experiment.pipeline
        self._batches: TranslationBatches | None = None
        self._vocabulary: str | None = None
        self._data: TextData | None = None
        if place.first or place.last:
            pipeline = experiment.pipeline
            self._data = TextData.open(data)
            self._vocabulary = self._data.digest
            self._batches = TranslationBatches(
                self._data, experiment.text, experiment.train, pipeline.replicas, pipeline.micro_batches
            )

    def batch(self, step: int) -> MiniBatch | None:
        """Source and target ids."""
        return self._batches.batch(step, self._place.replica) if self._batches is not None else None

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
        """Another vocabulary gives the same ids to other words."""
        if notes and self._vocabulary not in (None, notes.get("vocabulary")):
            raise DataError(
                "the checkpoint was trained with another vocabulary than the prepared text has, so its ids would mean "
                "other words; start a new run, or bring back the cache that the run was made with"
            )

    def baseline(self, held_out: HeldOut) -> float:
        """The unigram entropy of the same tokens."""
        return unigram_entropy(target for batch in held_out if batch for (target,) in batch.targets)


class ImageFeed:
    """Images for the first stage, labels for the last."""

    def __init__(self, experiment: ImageExperiment, data: Path, place: Place) -> None:
        self._place = place
        self._data: ImageData | None = None
        self._batches: ImageBatches | None = None
        if place.first or place.last:
            pipeline = experiment.pipeline
            self._data = ImageData.open(data)
            self._batches = ImageBatches(
                self._data, experiment.images, experiment.train, pipeline.replicas, pipeline.micro_batches
            )

    def batch(self, step: int) -> MiniBatch | None:
        """Images are read on the first stage alone."""
        if self._batches is None:
            return None
        return self._batches.batch(step, self._place.replica, images=self._place.first)

    def held_out(self) -> HeldOut:
        """The test images."""
        return _as_many(None if self._batches is None else self._batches.held_out(images=self._place.first))

    def notes(self) -> dict[str, Any]:
        """Classes mean what they meant as long as the set is the same."""
        return {"images": self._data.facts.source if self._data is not None else None}

    def counts(self) -> dict[str, int]:
        """Images."""
        assert self._data is not None
        return self._data.facts.counts

    def check(self, notes: dict[str, Any]) -> None:
        """Another set has other classes."""
        if notes and self._data is not None and notes.get("images") != self._data.facts.source:
            raise DataError(
                f"the checkpoint was trained on {notes.get('images')}, not on {self._data.facts.source}; "
                "start a new run"
            )

    def baseline(self, held_out: HeldOut) -> float:
        """The share of the commonest class."""
        assert self._data is not None
        return max(self._data.facts.shares)


def _as_many(batches: Sequence[MiniBatch] | None) -> HeldOut:
    """Returns the mini-batches, or as many times None as the first stage has some."""
    count: list[Any] = [len(batches) if batches is not None else None]
    dist.broadcast_object_list(count, src=0)
    return batches if batches is not None else [None] * int(count[0])
