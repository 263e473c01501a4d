"""Mini-batches from a data set of your own, cut into R x M micro-batches of rows."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import default_collate

from experiments.custom.loss import units_of
from suite.errors import DataError, first_line
from suite.pipeline.model.layers import Tensors, as_tuple
from suite.pipeline.model.microbatch import MiniBatch, sizes
from suite.pipeline.model.rng import mix
from suite.train_spec import Dataset, TrainSpec


class RowBatches:
    """The mini-batches of a run: those of a dataset in shuffled order, or those that a function returns."""

    def __init__(self, spec: TrainSpec, rows: int, seed: int) -> None:
        """``rows`` is the size of a mini-batch of a dataset."""
        self._spec, self._rows, self._seed = spec, rows, seed
        self._shuffled = lru_cache(maxsize=2)(self._shuffle)

    def share(self, step: int, replica: int, replicas: int, micro_batches: int) -> MiniBatch:
        """Returns the share of ``replica`` in the mini-batch of ``step``."""
        inputs, targets = self.whole(step)
        parts = sizes(len(inputs[0]), replicas * micro_batches)
        shares = sizes(len(parts), replicas) + [0] * replicas  # a mini-batch may have fewer rows than replicas
        offset = sum(shares[:replica])
        own = slice(offset, offset + shares[replica])
        return MiniBatch(_cut(inputs, parts)[own], _cut(targets, parts)[own], self._weight(targets, inputs), offset)

    def whole(self, step: int) -> tuple[Tensors, Tensors]:
        """Returns the inputs and targets of a whole mini-batch. Raises DataError when they are no mini-batch."""
        train = self._spec.train
        if not hasattr(train, "__getitem__"):
            return _checked(_called(lambda: train(step), f"the mini-batch of step {step}"), f"step {step}")
        data = cast(Dataset, train)
        places = range(step * self._rows, (step + 1) * self._rows)
        return self._read(data, [int(self._shuffled(place // len(data))[place % len(data)]) for place in places])

    def held_out(self, micro_batches: int) -> Iterator[MiniBatch]:
        """Yields the held-out rows in order, in mini-batches of ``rows``."""
        data = self._spec.valid
        assert data is not None
        for first in range(0, len(data), self._rows):
            inputs, targets = self._read(data, list(range(first, min(len(data), first + self._rows))))
            parts = sizes(len(inputs[0]), micro_batches)
            yield MiniBatch(_cut(inputs, parts), _cut(targets, parts), self._weight(targets, inputs))

    def _read(self, data: Dataset, rows: list[int]) -> tuple[Tensors, Tensors]:
        collate = self._spec.collate or default_collate
        what = f"the mini-batch of rows {', '.join(map(str, rows[:3]))}, ..."
        return _checked(_called(lambda: collate([data[row] for row in rows]), what), what)

    def _shuffle(self, epoch: int) -> Tensor:
        generator = torch.Generator().manual_seed(mix(3, self._seed, epoch))
        return torch.randperm(len(cast(Dataset, self._spec.train)), generator=generator)

    def _weight(self, targets: Tensors, inputs: Tensors) -> float:
        weight = units_of(self._spec, targets or inputs)
        if weight <= 0:
            raise DataError("a mini-batch has no units to take the mean over: all its targets are ignored")
        return weight


def _called(read: Any, what: str) -> Any:
    try:
        return read()
    except Exception as error:
        raise DataError(f"{what} cannot be read: {type(error).__name__}: {first_line(error)}") from error


def _checked(batch: Any, what: str) -> tuple[Tensors, Tensors]:
    """Returns inputs and targets as tuples of tensors. Raises DataError for anything else, and for unequal rows."""
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        kind = f"{type(batch).__name__} of {len(batch)}" if isinstance(batch, tuple | list) else type(batch).__name__
        raise DataError(f"{what} must be a pair (inputs, targets); it is a {kind}")
    inputs, targets = (as_tuple(part) for part in batch)
    for name, tensors in (("inputs", inputs), ("targets", targets)):
        for tensor in tensors:
            if not isinstance(tensor, Tensor) or tensor.dim() == 0:
                raise DataError(f"the {name} of {what} must be tensors with rows; one is a {type(tensor).__name__}")
    lengths = {len(tensor) for tensor in (*inputs, *targets)}
    if not inputs or lengths == {0}:
        raise DataError(f"{what} has no inputs")
    if len(lengths) > 1:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in (*inputs, *targets))
        raise DataError(f"the tensors of {what} differ in rows: {shapes}; the first axis of all must be equal")
    return inputs, targets


def _cut(tensors: Tensors, parts: list[int]) -> list[Tensors]:
    if not tensors:
        return [()] * len(parts)
    return list(zip(*(torch.split(tensor, parts) for tensor in tensors), strict=True))
