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
    tokens = torch.cat([torch.empty(0, dtype=torch.int64), *(tensor.flatten().cpu() for tensor in labels)])
    _, counts = tokens[tokens != padding].unique(return_counts=True)
    if not len(counts):
        raise DataError(
            f"cannot compute the entropy without tokens: there are no labels, or all are the padding id {padding}"
        )
    shares = counts.double() / counts.sum()
    return float(-(shares * shares.log()).sum())
