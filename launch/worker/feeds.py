"""Sources of a worker's mini-batches: text or images, read only on the stages that need them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from experiments.base.experiment import Experiment
from experiments.custom.experiment import CustomExperiment
from experiments.custom.loading import digest
from experiments.images.experiment import ImageExperiment
from experiments.language_model.experiment import LanguageModelExperiment
from experiments.translation.experiment import TranslationExperiment
from suite.data.documents.batches import RowBatches
from suite.data.documents.tokenizer import token_bytes
from suite.data.documents.tokens import TokenData
from suite.data.images.batches import ImageBatches
from suite.data.images.transforms import ImageData
from suite.data.text.batching import TranslationBatches
from suite.data.text.text import TextData
from suite.errors import DataError
from suite.evaluation.ngram import ngram_nll
from suite.evaluation.unigram import unigram_entropy
from suite.exchange import broadcast, gather
from suite.pipeline.model.layers import Tensors
from suite.pipeline.model.microbatch import MiniBatch
from suite.pipeline.model.topology import RankCoord
from suite.training.validation import HeldOut

_ORDERS = {"trigram": 3, "bigram": 2, "unigram": 1}
"""The n-gram models that a language model is compared with."""


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

    def baselines(self, held_out: HeldOut) -> dict[str, float]:
        """Returns scores without the model on the held-out mini-batches, by name, the one to beat first; empty if the
        data has none. Call it on the last stage only."""

    def bytes_per_unit(self, held_out: HeldOut) -> float | None:
        """Returns the bytes of text of a held-out token; None if units are no text. Call it on the last stage only."""


def data_source(experiment: Experiment, data: Path, coord: RankCoord) -> DataSource:
    """Returns the data source of an experiment's task."""
    if isinstance(experiment, TranslationExperiment):
        return TextSource(experiment, data, coord)
    if isinstance(experiment, LanguageModelExperiment):
        return DocumentSource(experiment, data, coord)
    if isinstance(experiment, CustomExperiment):
        return CustomSource(experiment, coord)
    assert isinstance(experiment, ImageExperiment), type(experiment)
    return ImageSource(experiment, data, coord)


class Batches(Protocol):
    """Mini-batches of prepared data."""

    def batch(self, step: int, replica: int, inputs: bool, targets: bool) -> MiniBatch:
        """Returns a replica's share of a step, with or without its inputs and its targets."""


class PreparedSource:
    """Prepared data, read on the first and the last stage."""

    is_thread_safe, has_held_out = True, True
    _coord: RankCoord
    _batches: Batches | None = None

    def batch(self, step: int) -> MiniBatch | None:
        """Inputs on the first stage, targets on the last."""
        coord = self._coord
        if self._batches is None:
            return None
        return self._batches.batch(step, coord.replica, coord.is_first, coord.is_last)


class TextSource(PreparedSource):
    """Sentence pairs."""

    _batches: TranslationBatches | None = None

    def __init__(self, experiment: TranslationExperiment, data: Path, coord: RankCoord) -> None:
        self._coord, self._train, self._pipeline = coord, experiment.train, experiment.pipeline
        self._data = TextData.open(data) if coord.is_first or coord.is_last else None
        self._vocabulary = self._data.digest if self._data is not None else None
        if self._data is not None:
            replicas, micro_batches = self._pipeline.replicas, self._pipeline.micro_batches
            self._batches = TranslationBatches(self._data, experiment.text, self._train, replicas, micro_batches)

    def held_out(self) -> HeldOut:
        """A fixed sample of pairs, in groups by language."""
        if self._batches is None:
            return _as_many(None)
        pairs, micro_batches = self._train.valid_pairs, self._pipeline.micro_batches
        held_out = self._batches.held_out(pairs, micro_batches, self._coord.is_first, self._coord.is_last)
        return _as_many(held_out, by_group=True)

    def notes(self) -> dict[str, Any]:
        """The vocabulary."""
        return {"vocabulary": self._vocabulary}

    def counts(self) -> dict[str, int]:
        """Pairs, over all languages."""
        assert self._data is not None
        return {split: sum(sizes) for split, sizes in self._data.sizes.items()}

    def check(self, notes: dict[str, Any]) -> str:
        """Compares vocabularies: with another one, ids would stand for other words."""
        _check_vocabulary(notes, self._vocabulary)
        return ""

    def baselines(self, held_out: HeldOut) -> dict[str, float]:
        """The unigram entropy of the same tokens."""
        return {"unigram_entropy": unigram_entropy(_labels(held_out))}

    def bytes_per_unit(self, held_out: HeldOut) -> None:
        """None: languages with other scripts have other bytes."""


class DocumentSource(PreparedSource):
    """Rows of tokens for the first stage, the same one token later for the last."""

    _batches: RowBatches | None = None

    def __init__(self, experiment: LanguageModelExperiment, data: Path, coord: RankCoord) -> None:
        self._coord, pipeline = coord, experiment.pipeline
        self._data = TokenData.open(data) if coord.is_first or coord.is_last else None
        self._vocabulary = self._data.digest if self._data is not None else None
        if self._data is not None:
            self._batches = RowBatches(
                self._data, experiment.text, experiment.train, pipeline.replicas, pipeline.micro_batches
            )

    def held_out(self) -> HeldOut:
        """Rows of the held-out documents."""
        if self._batches is None:
            return _as_many(None)
        return _as_many(self._batches.held_out(self._coord.is_first, self._coord.is_last))

    def notes(self) -> dict[str, Any]:
        """The vocabulary."""
        return {"vocabulary": self._vocabulary}

    def counts(self) -> dict[str, int]:
        """Tokens of each split."""
        assert self._data is not None
        return self._data.counts

    def check(self, notes: dict[str, Any]) -> str:
        """Compares vocabularies."""
        _check_vocabulary(notes, self._vocabulary)
        return ""

    def baselines(self, held_out: HeldOut) -> dict[str, float]:
        """N-gram models of the training tokens, on the same labels."""
        assert self._data is not None
        assert self._batches is not None
        rows = self._batches.held_out_ids()
        scores = ngram_nll(self._data.train, rows, len(self._data.tokenizer), _ORDERS.values())
        return dict(zip(_ORDERS, scores, strict=True))

    def bytes_per_unit(self, held_out: HeldOut) -> float:
        """Of the labels; end tokens have none."""
        assert self._data is not None
        labels = torch.cat([label.flatten() for label in _labels(held_out)])
        return float(token_bytes(self._data.tokenizer)[labels.numpy()].mean())


class ImageSource(PreparedSource):
    """Images for the first stage, labels for the last."""

    _batches: ImageBatches | None = None

    def __init__(self, experiment: ImageExperiment, data: Path, coord: RankCoord) -> None:
        self._coord, pipeline = coord, experiment.pipeline
        self._data = ImageData.open(data) if coord.is_first or coord.is_last else None
        if self._data is not None:
            self._batches = ImageBatches(
                self._data, experiment.images, experiment.train, pipeline.replicas, pipeline.micro_batches
            )

    def held_out(self) -> HeldOut:
        """The test images."""
        if self._batches is None:
            return _as_many(None)
        return _as_many(self._batches.held_out(self._coord.is_first, self._coord.is_last))

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

    def baselines(self, held_out: HeldOut) -> dict[str, float]:
        """The share of the most frequent class."""
        assert self._data is not None
        return {"most_frequent_class": max(self._data.info.shares)}

    def bytes_per_unit(self, held_out: HeldOut) -> None:
        """None: images are no text."""


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
        coord, pipeline = self._coord, self._experiment.pipeline
        batch = self._batches.batch(step, coord.replica, pipeline.replicas, pipeline.micro_batches)
        unused: list[Tensors] = [()] * len(batch)
        return replace(
            batch,
            inputs=batch.inputs if coord.is_first else unused,
            targets=batch.targets if coord.is_last else unused,
        )

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
        digests = gather(self._batches.digest() if self._batches is not None else None)
        if len({each for each in digests if each is not None}) > 1:
            raise DataError(
                f"{self._experiment.source} returned different data in different workers; it must return the same in "
                "every process: read files, or draw from the generators of torch, numpy and random, which are seeded"
            )
        if notes and notes.get("source") != digest(self._experiment.source):
            return f"{self._experiment.source} has changed since this run began; the run continues with what it is now"
        return ""

    def baselines(self, held_out: HeldOut) -> dict[str, float]:
        """None: what a model without input would score depends on the task."""
        return {}

    def bytes_per_unit(self, held_out: HeldOut) -> None:
        """None: the suite does not know the units."""


def _labels(held_out: HeldOut) -> Iterator[Tensor]:
    return (target for batch in held_out.batches if batch for (target,) in batch.targets)


def _check_vocabulary(notes: dict[str, Any], vocabulary: str | None) -> None:
    """Raises DataError if a checkpoint has another vocabulary than the prepared text."""
    if notes and vocabulary not in (None, notes.get("vocabulary")):
        raise DataError(
            "the checkpoint was trained with a different vocabulary than the prepared text, so its ids would stand "
            "for other words; restore the cache that it was trained with, or start a new run without it"
        )


def _as_many(batches: Sequence[MiniBatch] | None, by_group: bool = False) -> HeldOut:
    """Returns the mini-batches, or as many None as the first stage has mini-batches, and the names of their groups."""
    own = batches or ()
    names = {name for batch in own for name, _ in batch.groups} if by_group else set()
    count, groups = broadcast([len(own), sorted(names)])  # rank 0 is a first stage
    return HeldOut(batches if batches is not None else [None] * count, tuple(groups))
