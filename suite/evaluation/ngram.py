"""N-gram baselines of a language model: interpolated Kneser-Ney.

    P_n(w | h) = max(c(hw) - D, 0) / c(h)  +  D N(h) / c(h) P_n-1(w | h')        P_0(w) = 1 / vocabulary

h are the n-1 tokens before w, h' all but the first of them, c(h) the sum of c(hw) over all w, N(h) the number of tokens
w that follow h. At the highest order c counts occurrences; at lower ones it counts the different tokens that precede
(Kneser and Ney 1995; the interpolated form is equation 4.33 of Chen and Goodman, "An empirical study of smoothing
techniques for language modeling", 1998). D is n1 / (n1 + 2 n2) of each order, n1 and n2 the number of its n-grams with
count 1 and 2 (Ney, Essen and Kneser 1994); 0.5 where n1 or n2 is 0.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
        models = [KneserNey.count(train, below, vocabulary) for below in range(1, order + 1)]
        total, labels = 0.0, rows.shape[1] - 1
        for model in models:
            # tokens with exactly n - 1 tokens before them, or at the highest order with at least so many
            last = labels if model.order == order else min(labels, model.order - 1)
            first = max(1, model.order - 1)
            if first <= last:
                total -= float(np.log(model.probabilities(_windows(rows, model.order, first, last))).sum())
        scores.append(total / (len(rows) * labels))
    return scores


def _windows(rows: NDArray[Any], order: int, first: int, last: int) -> Ints:
    """Returns the n-grams (n-grams, order) that end at the columns ``first`` to ``last`` of each row."""
    ends = np.arange(first, last + 1)
    columns = ends[:, None] + np.arange(1 - order, 1)
    return rows[:, columns].reshape(-1, order).astype(np.int64)


@dataclass(frozen=True)
class _Order:
    """The counts of one order. Keys are n-grams as numbers of base ``vocabulary``, sorted."""

    keys: Ints
    counts: Ints
    contexts: Ints
    context_counts: Ints
    followers: Ints
    """N(h) of each context."""
    discount: float


@dataclass(frozen=True)
class KneserNey:
    """An interpolated Kneser-Ney model of one order."""

    vocabulary: int
    orders: tuple[_Order, ...]
    """From unigrams on."""

    @property
    def order(self) -> int:
        """n."""
        return len(self.orders)

    @classmethod
    def count(cls, tokens: NDArray[Any], order: int, vocabulary: int) -> KneserNey:
        """Counts the n-grams of a sequence of at least ``order`` token ids."""
        assert vocabulary**order < 2**63, (vocabulary, order)
        ids = tokens[:MOST_TOKENS].astype(np.int64)
        keys = np.zeros(len(ids) - order + 1, dtype=np.int64)
        for at in range(order):
            keys = keys * vocabulary + ids[at : at + len(keys)]
        kinds, counts = np.unique(keys, return_counts=True)
        orders = [_order(kinds, counts, vocabulary)]
        for below in range(order - 1, 0, -1):
            kinds, counts = np.unique(kinds % vocabulary**below, return_counts=True)
            orders.insert(0, _order(kinds, counts, vocabulary))
        return cls(vocabulary, tuple(orders))

    def probabilities(self, ngrams: Ints) -> NDArray[np.float64]:
        """Returns P(last token | the others) of each row of (n-grams, order)."""
        result = np.full(len(ngrams), 1 / self.vocabulary)
        for number, order in enumerate(self.orders, 1):
            keys = np.zeros(len(ngrams), dtype=np.int64)
            for column in ngrams.T[len(ngrams.T) - number :]:
                keys = keys * self.vocabulary + column
            counts = _look_up(order.keys, order.counts, keys)
            contexts = keys // self.vocabulary
            totals = _look_up(order.contexts, order.context_counts, contexts)
            followers = _look_up(order.contexts, order.followers, contexts)
            seen = totals > 0
            own = np.maximum(counts - order.discount, 0) + order.discount * followers * result
            result = np.where(seen, own / np.maximum(totals, 1), result)
        return result


def _order(keys: Ints, counts: Ints, vocabulary: int) -> _Order:
    contexts, first, followers = np.unique(keys // vocabulary, return_index=True, return_counts=True)
    once, twice = int((counts == 1).sum()), int((counts == 2).sum())
    discount = once / (once + 2 * twice) if once and twice else 0.5
    return _Order(keys, counts, contexts, np.add.reduceat(counts, first), followers, discount)


def _look_up(keys: Ints, values: Ints, wanted: Ints) -> Ints:
    """Returns the value of each wanted key, 0 for those that are not there."""
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, values[at], 0)
