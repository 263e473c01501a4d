"""Baselines of a language model: the entropy of single tokens, and n-grams with interpolated Kneser-Ney.

    P_n(w | h) = max(c(hw) - D, 0) / c(h)  +  D N(h) / c(h) P_n-1(w | h')        P_0(w) = 1 / vocabulary

h are the n-1 tokens before w, h' all but the first of them, c(h) the sum of c(hw) over all w, N(h) the number of tokens
w that follow h. At the highest order c counts occurrences; at lower ones it counts the different tokens that precede
(Kneser and Ney 1995; the interpolated form is equation 4.33 of Chen and Goodman, "An empirical study of smoothing
techniques for language modeling", 1998). D is n1 / (n1 + 2 n2) of each order, n1 and n2 the number of its n-grams with
count 1 and 2 (Ney, Essen and Kneser 1994); 0.5 where n1 or n2 is 0.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from suite.errors import DataError

Ints = NDArray[np.int64]

MOST_TOKENS = 2**25
"""Training tokens that are counted: the first 33.5 million, which take about 2 GiB and half a minute."""


def ngram_nll(train: NDArray[Any], rows: NDArray[Any], vocabulary: int, orders: Iterable[int]) -> list[float]:
    """Returns the negative log likelihood in nats per token of n-gram models of these orders.

    ``train`` (tokens,) is counted. ``rows`` (rows, length + 1) are scored but for their first column, each with the
    tokens before it in its row: what a language model sees. Near the beginning that is less than n - 1 tokens, and
    there the model of a lower order scores.
    """
    scores = []
    for order in orders:
        total, labels = 0.0, rows.shape[1] - 1
        for n in range(1, order + 1):
            # the tokens with exactly n - 1 tokens before them, or at the highest order with at least so many
            ends = np.arange(max(1, n - 1), (labels if n == order else min(labels, n - 1)) + 1)
            if len(ends):
                ngrams = rows[:, ends[:, None] + np.arange(1 - n, 1)].reshape(-1, n).astype(np.int64)
                total -= float(np.log(KneserNey(train, n, vocabulary).probabilities(ngrams)).sum())
        scores.append(total / (len(rows) * labels))
    return scores


class _Order:
    """The counts of one order. Keys are n-grams as numbers of base ``vocabulary``, sorted; ``followers`` is N(h)."""

    def __init__(self, ngrams: Ints, vocabulary: int) -> None:
        """Counts n-grams, which are numbers."""
        self.keys, self.counts = np.unique(ngrams, return_counts=True)
        self.contexts, first, self.followers = np.unique(self.keys // vocabulary, return_index=True, return_counts=True)
        self.context_counts: Ints = np.add.reduceat(self.counts, first)
        once, twice = int((self.counts == 1).sum()), int((self.counts == 2).sum())
        self.discount = once / (once + 2 * twice) if once and twice else 0.5


class KneserNey:
    """An interpolated Kneser-Ney model of one order."""

    def __init__(self, tokens: NDArray[Any], order: int, vocabulary: int) -> None:
        """Counts the n-grams of a sequence of at least ``order`` token ids."""
        assert vocabulary**order < 2**63, (vocabulary, order)
        ids = tokens[:MOST_TOKENS].astype(np.int64)
        orders = [_Order(_keys(np.lib.stride_tricks.sliding_window_view(ids, order), vocabulary), vocabulary)]
        for below in range(order - 1, 0, -1):
            orders.insert(0, _Order(orders[0].keys % vocabulary**below, vocabulary))
        self._vocabulary, self._orders = vocabulary, orders

    def probabilities(self, ngrams: Ints) -> NDArray[np.float64]:
        """Returns P(last token | the others) of each row of (n-grams, order)."""
        result = np.full(len(ngrams), 1 / self._vocabulary)
        for number, order in enumerate(self._orders, 1):
            keys = _keys(ngrams[:, -number:], self._vocabulary)
            counts = _look_up(order.keys, order.counts, keys)
            contexts = keys // self._vocabulary
            totals = _look_up(order.contexts, order.context_counts, contexts)
            followers = _look_up(order.contexts, order.followers, contexts)
            own = np.maximum(counts - order.discount, 0) + order.discount * followers * result
            result = np.where(totals > 0, own / np.maximum(totals, 1), result)
        return result


def _keys(ngrams: Ints, vocabulary: int) -> Ints:
    """Returns n-grams (n-grams, order) as numbers of base ``vocabulary``."""
    return ngrams @ vocabulary ** np.arange(ngrams.shape[1] - 1, -1, -1, dtype=np.int64)


def _look_up(keys: Ints, values: Ints, wanted: Ints) -> Ints:
    """Returns the value of each wanted key, 0 for those that are not there."""
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, values[at], 0)


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
