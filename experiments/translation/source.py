"""Sentence pairs for the workers of a translation run."""

from __future__ import annotations

from experiments.base.data_source import TokenSource, labels
from suite.data.text.batching import TranslationBatches
from suite.data.text.text import TextData
from suite.evaluation.ngram import unigram_entropy
from suite.training.validation import HeldOut


class TextSource(TokenSource):
    """Sentence pairs; those held out are a fixed sample, in groups by language."""

    by_group, data_type, batches_type = True, TextData, TranslationBatches
    _data: TextData

    def counts(self) -> dict[str, int]:
        """Pairs, over all languages."""
        return {split: sum(sizes) for split, sizes in self._data.sizes.items()}

    def baselines(self, held_out: HeldOut) -> dict[str, float]:
        return {"unigram_entropy": unigram_entropy(labels(held_out))}
