"""The score to beat: the best that a predictor can do which knows how often each token comes, and nothing else."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from suite.errors import DataError


def unigram_entropy(labels: Iterable[Tensor], padding: int = 0) -> float:
    """Returns the entropy, in nats a token, of the empirical distribution of the labels; padding is not counted.

    No predictor that gives every position the same distribution has a lower mean negative log likelihood on these
    tokens, because the frequencies used are those of the very tokens it is scored on. A real unigram model would take
    them from training text and do worse: the bound is in the baseline's favour, and a model below it uses context.

    ``labels`` are integer tensors of any shape. Raises DataError when there is no token but padding.
    """
    counts = torch.zeros(0, dtype=torch.int64)
    for tensor in labels:
        found = torch.bincount(tensor.reshape(-1).cpu())
        counts, found = (counts, found) if len(counts) >= len(found) else (found, counts)
        counts[: len(found)] += found
    if padding < len(counts):
        counts[padding] = 0
    total = int(counts.sum())
    if total == 0:
        raise DataError(
            f"there is no token to take the entropy of: every label is the padding id {padding}, or none came"
        )
    shares = counts[counts > 0].double() / total
    return float(-(shares * shares.log()).sum())
