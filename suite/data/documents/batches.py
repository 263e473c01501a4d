"""Mini-batches of a language model: rows of equal length, cut from the sequence of all tokens.

    tokens   a b c d e f g h i      length 4: row 0 has inputs a b c d and labels b c d e, row 1 e f g h and f g h i

A mini-batch depends only on (seed, step): the rows are one endless sequence of shuffled epochs, and a step is the next
slice of it. Stages and replicas have no influence, except on how a mini-batch is cut into micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from suite.data.documents.tokens import TokenData
from suite.errors import SettingError
from suite.pipeline.model.microbatch import LazyMiniBatches, MiniBatch, replica_share, sizes
from suite.pipeline.model.rng import mix
from suite.settings import DocumentSettings, DocumentTrainSettings


class RowBatches:
    """The training mini-batches of a run, by step and replica, and its held-out mini-batches."""

    def __init__(
        self, data: TokenData, text: DocumentSettings, train: DocumentTrainSettings, replicas: int, micro_batches: int
    ) -> None:
        """Raises SettingError when a mini-batch has fewer sequences than there are replicas."""
        if train.batch_sequences < replicas:
            raise SettingError(
                f"train.batch_sequences={train.batch_sequences} is too small for {replicas} replicas; "
                f"raise it to {replicas} or more"
            )
        self._train_tokens, self._held_out_tokens = data.train, data.splits[data.held_out]
        self._length, self._train = text.length, train
        self._replicas, self._micro_batches = replicas, micro_batches
        self._shuffled = lru_cache(maxsize=2)(self._shuffle)

    def batch(self, step: int, replica: int) -> MiniBatch:
        """Returns the share of ``replica`` in the mini-batch of ``step``.

        A micro-batch is inputs (ids (B, length),) and targets (labels (B, length),), int64. The weight is the tokens of
        the whole mini-batch.
        """
        parts, share = replica_share(self._train.batch_sequences, replica, self._replicas, self._micro_batches)
        first, own = sum(parts[: share.start]), parts[share]
        rows = self.rows(step)[first : first + sum(own)]
        weight = self._train.batch_sequences * self._length
        return self._mini_batch(self._train_tokens, rows, own, weight, share.start)

    def rows(self, step: int) -> list[int]:
        """Returns the rows of a step's mini-batch, in order."""
        total, count = _rows(self._train_tokens, self._length), self._train.batch_sequences
        places = range(step * count, (step + 1) * count)
        return [int(self._shuffled(place // total)[place % total]) for place in places]

    def held_out(self) -> Sequence[MiniBatch]:
        """Returns ``train.valid_sequences`` held-out rows, evenly spaced, or all if there are fewer."""
        total = _rows(self._held_out_tokens, self._length)
        count = min(total, self._train.valid_sequences or total)
        chosen = [at * total // count for at in range(count)]
        size = self._train.batch_sequences
        groups = [range(first, min(count, first + size)) for first in range(0, count, size)]
        return LazyMiniBatches(groups, lambda group: self._held_out([chosen[at] for at in group]))

    def _held_out(self, rows: Sequence[int]) -> MiniBatch:
        weight = len(rows) * self._length
        return self._mini_batch(self._held_out_tokens, rows, sizes(len(rows), self._micro_batches), weight)

    def _mini_batch(
        self, tokens: NDArray[Any], rows: Sequence[int], parts: Sequence[int], weight: int, offset: int = 0
    ) -> MiniBatch:
        taken = [tokens[row * self._length : (row + 1) * self._length + 1] for row in rows]
        ids = torch.from_numpy(np.stack(taken).astype(np.int64)) if rows else torch.empty(0, self._length + 1).long()
        cut = ids.split(list(parts))
        inputs = [(part[:, :-1].contiguous(),) for part in cut]
        targets = [(part[:, 1:].contiguous(),) for part in cut]
        return MiniBatch(inputs, targets, float(weight), offset)

    def _shuffle(self, epoch: int) -> Tensor:
        generator = torch.Generator().manual_seed(mix(6, self._train.seed, epoch))
        return torch.randperm(_rows(self._train_tokens, self._length), generator=generator)


def _rows(tokens: NDArray[Any], length: int) -> int:
    return (len(tokens) - 1) // length
