"""Sentence pairs for the workers of a translation run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.base.data_source import PreparedSource, check_vocabulary, held_out_on_all, labels
from suite.data.text.batching import TranslationBatches
from suite.data.text.text import TextData
from suite.evaluation.unigram import unigram_entropy
from suite.pipeline.model.topology import RankCoord
from suite.training.validation import HeldOut

if TYPE_CHECKING:
    from experiments.translation.experiment import TranslationExperiment


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
            return held_out_on_all(None)
        pairs, micro_batches = self._train.valid_pairs, self._pipeline.micro_batches
        held_out = self._batches.held_out(pairs, micro_batches, self._coord.is_first, self._coord.is_last)
        return held_out_on_all(held_out, by_group=True)

    def notes(self) -> dict[str, Any]:
        """The vocabulary."""
        return {"vocabulary": self._vocabulary}

    def counts(self) -> dict[str, int]:
        """Pairs, over all languages."""
        assert self._data is not None
        return {split: sum(sizes) for split, sizes in self._data.sizes.items()}

    def check(self, notes: dict[str, Any]) -> str:
        """Compares vocabularies: with another one, ids would stand for other words."""
        check_vocabulary(notes, self._vocabulary)
        return ""

    def baselines(self, held_out: HeldOut) -> dict[str, float]:
        """The unigram entropy of the same tokens."""
        return {"unigram_entropy": unigram_entropy(labels(held_out))}

    def bytes_per_unit(self, held_out: HeldOut) -> None:
        """None: languages with other scripts have other bytes."""
