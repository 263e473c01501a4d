"""An endless sequence of shuffled epochs, of which each step takes the next rows: a function of the seed alone.

4 rows    epoch 0: 2 0 3 1    epoch 1: 1 2 0 3    steps of 3 rows: 2 0 3 | 1 1 2 | 0 3 ...
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from suite.errors import SettingError
from suite.pipeline.model.layers import Tensors
from suite.pipeline.model.microbatch import LazyMiniBatches, ReplicaBatch, even_split_sizes, replica_share
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


class EpochBatches(ABC):
    """The mini-batches of a run on rows. Those of training depend on seed, step and their size alone: the number
    of stages and replicas has no influence, except on how they are cut into micro-batches."""

    setting: ClassVar[str]
    """The setting of the size of a mini-batch."""

    def __init__(
        self, epochs: ShuffledEpochs, size: int, held_out: int, units: int, replicas: int, micro_batches: int
    ) -> None:
        """``size`` is the rows of a mini-batch, ``held_out`` the number of held-out rows, ``units`` those of a row.
        Raises SettingError when a mini-batch has fewer rows than there are replicas."""
        if size < replicas:
            raise SettingError(
                f"{self.setting}={size} is too small for {replicas} replicas; raise it to {replicas} or more"
            )
        self._epochs, self._size, self._held_out_rows, self._units = epochs, size, held_out, units
        self._replicas, self._micro_batches = replicas, micro_batches

    @abstractmethod
    def _read(self, rows: Sequence[int], step: int | None, places: slice) -> tuple[Callable[[], Tensor], ...]:
        """Returns two functions: one reads the inputs of ``rows``, one the targets. With a step these are training
        rows, at ``places`` of its mini-batch; with None held-out ones."""

    def batch(self, step: int, replica: int, inputs: bool = True, targets: bool = True) -> ReplicaBatch:
        """Returns the share of ``replica`` in the mini-batch of ``step``: micro-batches of one tensor each. Without
        ``inputs``, or without ``targets``, these are empty. The divisor is the units of the whole mini-batch."""
        parts = even_split_sizes(self._size, self._replicas * self._micro_batches)
        share = replica_share(len(parts), replica, self._replicas)
        first, own = sum(parts[: share.start]), parts[share]
        places = slice(first, first + sum(own))
        read = self._read(self.rows(step)[places], step, places)
        divisor = float(self._size * self._units)
        return ReplicaBatch(_cut(read[0], own, inputs), _cut(read[1], own, targets), divisor, share.start)

    def rows(self, step: int) -> list[int]:
        """Returns the rows of a step's mini-batch, in order."""
        return self._epochs.rows(step * self._size, (step + 1) * self._size)

    def held_out(self, inputs: bool = True, targets: bool = True) -> Sequence[ReplicaBatch]:
        """Returns the held-out rows in mini-batches that are read on access."""

        def mini_batch(rows: range) -> ReplicaBatch:
            read, parts = self._read(rows, None, slice(None)), even_split_sizes(len(rows), self._micro_batches)
            divisor = float(len(rows) * self._units)
            return ReplicaBatch(_cut(read[0], parts, inputs), _cut(read[1], parts, targets), divisor)

        return LazyMiniBatches(self._held_out_rows, self._size, mini_batch)


def _cut(read: Callable[[], Tensor], parts: list[int], wanted: bool) -> list[Tensors]:
    """Reads micro-batches of so many rows; empty ones if they are not wanted. They keep their layout in memory, on
    which the rounding of convolutions depends."""
    return [(part,) for part in read().split(parts)] if wanted else [()] * len(parts)
