"""Sources of a worker's mini-batches: text or images, read only on the stages that need them."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

from experiments.base.experiment import Experiment
from experiments.custom.experiment import CustomExperiment
from experiments.custom.loading import digest
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
from suite.training.validation import HeldOut


class DataSource(Protocol):
    """Mini-batches for the stages that need them, None for all others."""

    def batch(self, step: int) -> MiniBatch | None:
        """Returns this worker's share of a step."""

    def held_out(self) -> HeldOut:
        """Returns the held-out mini-batches. All workers must call it."""

    has_held_out: bool
    """Whether there are any."""

    def notes(self) -> dict[str, Any]:
        """Returns the description of the data that checkpoints store."""

    def counts(self) -> dict[str, int]:
        """Returns the number of examples of each split. Call it on the last stage only."""

    is_thread_safe: bool
    """Whether ``batch`` may be called in another thread than the layers: it draws no global random numbers."""

    def check(self, notes: dict[str, Any]) -> str:
        """Returns a warning if a checkpoint may be of other data, empty otherwise; all workers must call it.

        Raises DataError when it certainly is.
        """

    def baseline(self, held_out: HeldOut) -> float | None:
        """Returns the baseline score, without a model, on the held-out mini-batches; None if the data has none. Call it
        on the last stage only."""


def data_source(experiment: Experiment, data: Path, coord: RankCoord) -> DataSource:
    """Returns the data source of an experiment's task."""
    if isinstance(experiment, TranslationExperiment):
        return TextSource(experiment, data, coord)
    if isinstance(experiment, CustomExperiment):
        return CustomSource(experiment, coord)
    assert isinstance(experiment, ImageExperiment), type(experiment)
    return ImageSource(experiment, data, coord)


class TextSource:
    """Sentence pairs."""

    is_thread_safe, has_held_out = True, True

    def __init__(self, experiment: TranslationExperiment, data: Path, coord: RankCoord) -> None:
        self._coord, self._train, self._pipeline = coord, experiment.train, experiment.pipeline
        self._batches: TranslationBatches | None = None
        self._data = TextData.open(data) if coord.is_first or coord.is_last else None
        self._vocabulary = self._data.digest if self._data is not None else None
        if self._data is not None:
            replicas, micro_batches = self._pipeline.replicas, self._pipeline.micro_batches
            self._batches = TranslationBatches(self._data, experiment.text, self._train, replicas, micro_batches)

    def batch(self, step: int) -> MiniBatch | None:
        """Source and target ids."""
        return self._batches.batch(step, self._coord.replica) if self._batches is not None else None

    def held_out(self) -> HeldOut:
        """A fixed sample of pairs, in groups by language."""
        if self._batches is None:
            return _as_many(None)
        return _as_many(self._batches.held_out(self._train.valid_pairs, self._pipeline.micro_batches), by_group=True)

    def notes(self) -> dict[str, Any]:
        """The vocabulary."""
        return {"vocabulary": self._vocabulary}

    def counts(self) -> dict[str, int]:
        """Pairs, over all languages."""
        assert self._data is not None
        return {split: sum(sizes) for split, sizes in self._data.sizes.items()}

    def check(self, notes: dict[str, Any]) -> str:
        """Compares vocabularies: with another one, ids would stand for other words."""
        if notes and self._vocabulary not in (None, notes.get("vocabulary")):
            raise DataError(
                "the checkpoint was trained with a different vocabulary than the prepared text, so its ids would stand "
                "for other words; start a new run, or restore the cache that the run was trained with"
            )
        return ""

    def baseline(self, held_out: HeldOut) -> float:
        """The unigram entropy of the same tokens."""
        return unigram_entropy(target for batch in held_out.batches if batch for (target,) in batch.targets)


class ImageSource:
    """Images for the first stage, labels for the last."""

    is_thread_safe, has_held_out = True, True

    def __init__(self, experiment: ImageExperiment, data: Path, coord: RankCoord) -> None:
        self._coord, pipeline = coord, experiment.pipeline
        self._batches: ImageBatches | None = None
        self._data = ImageData.open(data) if coord.is_first or coord.is_last else None
        if self._data is not None:
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
        return {"images": self._data.info.source if self._data is not None else None}

    def counts(self) -> dict[str, int]:
        """Images of each split."""
        assert self._data is not None
        return self._data.info.counts

    def check(self, notes: dict[str, Any]) -> str:
        """Compares image sets: another one has other classes."""
        if notes and self._data is not None and notes.get("images") != self._data.info.source:
            raise DataError(
                f"the checkpoint was trained on {notes.get('images')}, not on {self._data.info.source}; start a new run"
            )
        return ""

    def baseline(self, held_out: HeldOut) -> float:
        """The share of the most frequent class."""
        assert self._data is not None
        return max(self._data.info.shares)


class CustomSource:
    """The data of a TrainSpec."""

    def __init__(self, experiment: CustomExperiment, coord: RankCoord) -> None:
        self._experiment, self._coord, self.is_thread_safe = experiment, coord, experiment.spec.prefetch
        self._batches = experiment.batches() if coord.is_first or coord.is_last else None
        self.has_held_out = experiment.spec.valid is not None

    def batch(self, step: int) -> MiniBatch | None:
        """Inputs and targets."""
        if self._batches is None:
            return None
        pipeline = self._experiment.pipeline
        return self._batches.batch(step, self._coord.replica, pipeline.replicas, pipeline.micro_batches)

    def held_out(self) -> HeldOut:
        """The held-out rows; call it only if there are any."""
        micro_batches, most = self._experiment.pipeline.micro_batches, self._experiment.train.valid_rows
        return _as_many(None if self._batches is None else self._batches.held_out(micro_batches, most))

    def notes(self) -> dict[str, Any]:
        """The digest of the file with the function."""
        return {"source": digest(self._experiment.source)}

    def counts(self) -> dict[str, int]:
        """Rows of each data set."""
        sets = {"train": self._experiment.spec.train, "valid": self._experiment.spec.valid}
        return {name: len(data) for name, data in sets.items() if isinstance(data, Sized)}

    def check(self, notes: dict[str, Any]) -> str:
        """Compares what the function returns on all workers, which each call it themselves; returns a warning if its
        file has changed since the checkpoint."""
        own = self._batches.digest() if self._batches is not None else None
        digests: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(digests, own)
        if len({each for each in digests if each is not None}) > 1:
            raise DataError(
                f"{self._experiment.source} returned different data in different workers; it must return the same in "
                "every process: read files, or draw from the generators of torch, numpy and random, which are seeded"
            )
        if notes and notes.get("source") != digest(self._experiment.source):
            return f"{self._experiment.source} has changed since this run began; the run continues with what it is now"
        return ""

    def baseline(self, held_out: HeldOut) -> None:
        """None: what a model without input would score depends on the task."""


def _as_many(batches: Sequence[MiniBatch] | None, by_group: bool = False) -> HeldOut:
    """Returns the mini-batches, or as many None as the first stage has mini-batches, and the names of their groups."""
    shared: list[Any] = [None]
    if batches is not None:
        names = {name for batch in batches for name, _ in batch.groups} if by_group else set()
        shared = [(len(batches), tuple(sorted(names)))]
    dist.broadcast_object_list(shared, src=0)
    count, groups = shared[0]
    return HeldOut(batches if batches is not None else [None] * count, groups)
