"""A baseline: the best loss of a predictor that knows only the frequency of each token."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from suite.errors import DataError


def unigram_entropy(labels: Iterable[Tensor], padding: int = 0) -> float:
    """Returns the entropy in nats per token of the labels' empirical distribution, without padding.

    This is the lowest mean negative log likelihood of a predictor with the same distribution at every position, because
    the frequencies are those of the scored tokens. A real unigram model takes them from training text and does worse,
    so a model below this bound uses context.
    """
    counts = torch.zeros(0, dtype=torch.int64)
    for tensor in labels:
        added = torch.bincount(tensor.reshape(-1).cpu())
        counts, added = (counts, added) if len(counts) >= len(added) else (added, counts)
        counts[: len(added)] += added
    if padding < len(counts):
        counts[padding] = 0
    total = int(counts.sum())
    if total == 0:
        raise DataError(
            f"cannot compute the entropy without tokens: there are no labels, or all are the padding id {padding}"
        )
    shares = counts[counts > 0].double() / total
    return float(-(shares * shares.log()).sum())
