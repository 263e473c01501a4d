"""What a translation run takes from its prepared text before it trains: sample micro-batches, and a count."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from suite.data.text.batching import TranslationBatches
from suite.data.text.splitting import VALID
from suite.data.text.text import TextData
from suite.pipeline.planning.sample import MicroBatch, Sample

if TYPE_CHECKING:
    from experiments.translation.experiment import TranslationExperiment


@lru_cache(maxsize=8)
def validation_pairs(text: Path, languages: tuple[str, ...] | None) -> int:
    """Returns how many validation pairs the languages have."""
    data = TextData(text)
    return sum(data.sizes[VALID][language] for language in data.drawn(languages))


@lru_cache(maxsize=8)
def from_text(experiment: TranslationExperiment, text: Path) -> Sample:
    """Returns the micro-batches of mean and of largest size of the first mini-batches."""
    pipeline, train = experiment.pipeline, experiment.train
    # as one replica, which gets all micro-batches; with several, the first gets only the shortest sentences
    count = pipeline.replicas * pipeline.micro_batches
    batches = TranslationBatches(TextData(text), experiment.text, train, 1, count)
    parts: list[MicroBatch] = []
    for step in range(max(1, min(16, 50_000 // train.batch_tokens))):
        batch = batches.batch(step, 0)
        parts += [MicroBatch(i, t) for i, t in zip(batch.inputs, batch.targets, strict=True)]
    mean = sum(map(_padded_tokens, parts)) / len(parts)
    return Sample(min(parts, key=lambda part: abs(_padded_tokens(part) - mean)), max(parts, key=_padded_tokens))


def _padded_tokens(part: MicroBatch) -> int:
    """Returns the tokens of source and target, padding included."""
    return sum(tensor.numel() for tensor in part.inputs)
