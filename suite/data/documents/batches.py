"""Mini-batches of a language model: rows of equal length, cut from the sequence of all tokens.

tokens   a b c d e f g h i      length 4: row 0 has inputs a b c d and labels b c d e, row 1 e f g h and f g h i
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from suite.data.documents.tokens import TokenData
from suite.data.epochs import EpochBatches, ShuffledEpochs
from suite.settings import DocumentSettings, DocumentTrainSettings


class RowBatches(EpochBatches):
    """A micro-batch is ids (B, length) and labels (B, length), int64; a unit is a token."""

    setting = "train.batch_sequences"

    def __init__(
        self, data: TokenData, text: DocumentSettings, train: DocumentTrainSettings, replicas: int, micro_batches: int
    ) -> None:
        self._tokens, self._held_out_tokens, self._length = data.train, data.splits[data.held_out], text.length
        rows, total = ((len(tokens) - 1) // text.length for tokens in (self._tokens, self._held_out_tokens))
        count = min(total, train.valid_sequences or total)
        self._places = np.arange(count) * total // count
        epochs = ShuffledEpochs(rows, 6, train.seed)
        super().__init__(epochs, train.batch_sequences, count, text.length, replicas, micro_batches)

    def held_out_ids(self) -> NDArray[np.int64]:
        """Returns all held-out rows, each with the token that follows it, (rows, length + 1): evenly spaced ones, if
        ``train.valid_sequences`` asks for fewer than there are."""
        return _ids(self._held_out_tokens, self._places, self._length)

    def _read(self, rows: Sequence[int], step: int | None, places: slice) -> tuple[Callable[[], Tensor], ...]:
        if step is None:
            ids = torch.from_numpy(_ids(self._held_out_tokens, self._places[rows], self._length))
        else:
            ids = torch.from_numpy(_ids(self._tokens, rows, self._length))
        return lambda: ids[:, :-1].contiguous(), lambda: ids[:, 1:].contiguous()


def _ids(tokens: NDArray[Any], rows: Sequence[int] | NDArray[np.int64], length: int) -> NDArray[np.int64]:
    """Returns rows of tokens, each with the one that follows it, (rows, length + 1)."""
    return tokens[np.array(rows, dtype=np.int64)[:, None] * length + np.arange(length + 1)].astype(np.int64)
