"""An endless sequence of shuffled epochs, of which each step takes the next rows: a function of the seed alone.

4 rows    epoch 0: 2 0 3 1    epoch 1: 1 2 0 3    steps of 3 rows: 2 0 3 | 1 1 2 | 0 3 ...
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from suite.pipeline.model.rng import mix


class ShuffledEpochs:
    """The rows of a data set, shuffled in each epoch."""

    def __init__(self, total: int, *seed: int) -> None:
        """``total`` is the number of rows; ``seed`` and the epoch determine its order."""
        self._total, self._seed = total, seed
        self._shuffled = lru_cache(maxsize=2)(self._shuffle)

    def rows(self, begin: int, end: int) -> list[int]:
        """Returns the rows at the places from ``begin`` to ``end`` of the sequence."""
        rows: list[int] = []
        while begin + len(rows) < end:
            epoch, place = divmod(begin + len(rows), self._total)
            rows += self._shuffled(epoch)[place : place + end - begin - len(rows)].tolist()
        return rows

    def _shuffle(self, epoch: int) -> Tensor:
        return torch.randperm(self._total, generator=torch.Generator().manual_seed(mix(*self._seed, epoch)))
