"""Sentence pairs for the workers of a translation run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from experiments.base.data_source import TokenSource, labels
from suite.data.text.batching import TranslationBatches
from suite.data.text.text import TextData
from suite.evaluation.unigram import unigram_entropy
from suite.pipeline.model.topology import RankCoord
from suite.training.validation import HeldOut

if TYPE_CHECKING:
    from experiments.translation.experiment import TranslationExperiment


class TextSource(TokenSource):
    """Sentence pairs; those held out are a fixed sample, in groups by language."""

    by_group = True
    _data: TextData

    def __init__(self, experiment: TranslationExperiment, data: Path, coord: RankCoord) -> None:
        self._coord, pipeline = coord, experiment.pipeline
        if coord.is_first or coord.is_last:
            self._data = TextData(data)
            self._vocabulary = self._data.digest
            self._batches = TranslationBatches(
                self._data, experiment.text, experiment.train, pipeline.replicas, pipeline.micro_batches
            )

    def counts(self) -> dict[str, int]:
        """Pairs, over all languages."""
        return {split: sum(sizes) for split, sizes in self._data.sizes.items()}

    def baselines(self, held_out: HeldOut) -> dict[str, float]:
        return {"unigram_entropy": unigram_entropy(labels(held_out))}
