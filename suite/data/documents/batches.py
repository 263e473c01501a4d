"""Mini-batches of a language model: rows of equal length, cut from the sequence of all tokens.

    tokens   a b c d e f g h i      length 4: row 0 has inputs a b c d and labels b c d e, row 1 e f g h and f g h i

A mini-batch depends only on (seed, step): the rows are one endless sequence of shuffled epochs, and a step is the next
slice of it. Stages and replicas have no influence, except on how a mini-batch is cut into micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from suite.data.documents.tokens import TokenData
from suite.data.epochs import ShuffledEpochs
from suite.errors import SettingError
from suite.pipeline.model.layers import Tensors
from suite.pipeline.model.microbatch import LazyMiniBatches, MiniBatch, replica_share, sizes
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
        self._epochs = ShuffledEpochs(_rows(self._train_tokens, self._length), 6, train.seed)

    def batch(self, step: int, replica: int, inputs: bool = True, targets: bool = True) -> MiniBatch:
        """Returns the share of ``replica`` in the mini-batch of ``step``.

        A micro-batch is inputs (ids (B, length),) and targets (labels (B, length),), int64. Without ``inputs``, or
        without ``targets``, these are empty. The weight is the tokens of the whole mini-batch.
        """
        parts, share = replica_share(self._train.batch_sequences, replica, self._replicas, self._micro_batches)
        first, own = sum(parts[: share.start]), parts[share]
        rows = self.rows(step)[first : first + sum(own)]
        weight = self._train.batch_sequences * self._length
        ids = _ids(self._train_tokens, rows, self._length)
        return MiniBatch(*_cut(ids, own, inputs, targets), float(weight), share.start)

    def rows(self, step: int) -> list[int]:
        """Returns the rows of a step's mini-batch, in order."""
        count = self._train.batch_sequences
        return self._epochs.rows(step * count, (step + 1) * count)

    def held_out(self, inputs: bool = True, targets: bool = True) -> Sequence[MiniBatch]:
        """Returns ``train.valid_sequences`` held-out rows, evenly spaced, or all if there are fewer."""
        rows, size = self._held_out_rows(), self._train.batch_sequences
        groups = [range(first, min(len(rows), first + size)) for first in range(0, len(rows), size)]
        return LazyMiniBatches(groups, lambda group: self._held_out(rows[group], inputs, targets))

    def held_out_ids(self) -> NDArray[np.int64]:
        """Returns all held-out rows, each with the token that follows it, (rows, length + 1)."""
        return _ids(self._held_out_tokens, self._held_out_rows(), self._length)

    def _held_out_rows(self) -> NDArray[np.int64]:
        total = _rows(self._held_out_tokens, self._length)
        count = min(total, self._train.valid_sequences or total)
        return np.arange(count) * total // count

    def _held_out(self, rows: NDArray[np.int64], inputs: bool, targets: bool) -> MiniBatch:
        ids = _ids(self._held_out_tokens, rows, self._length)
        return MiniBatch(*_cut(ids, sizes(len(rows), self._micro_batches), inputs, targets), float(ids[:, 1:].size))


def _ids(tokens: NDArray[Any], rows: Sequence[int] | NDArray[np.int64], length: int) -> NDArray[np.int64]:
    """Returns rows of tokens, each with the one that follows it, (rows, length + 1)."""
    return tokens[np.array(rows, dtype=np.int64)[:, None] * length + np.arange(length + 1)].astype(np.int64)


def _cut(
    ids: NDArray[np.int64], parts: Sequence[int], inputs: bool, targets: bool
) -> tuple[list[Tensors], list[Tensors]]:
    """Returns the inputs and the targets of micro-batches of so many rows."""
    cut = torch.from_numpy(ids).split(list(parts))
    return (
        [(part[:, :-1].contiguous(),) if inputs else () for part in cut],
        [(part[:, 1:].contiguous(),) if targets else () for part in cut],
    )


def _rows(tokens: NDArray[Any], length: int) -> int:
    return (len(tokens) - 1) // length
