"""Mini-batches from a data set of your own, cut into R x M micro-batches of rows."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from experiments.custom.loading import seeded
from experiments.custom.loss import units_of
from experiments.custom.trial import bytes_of, generator_states
from suite.data.epochs import ShuffledEpochs
from suite.errors import DataError, SettingError, typed_line
from suite.pipeline.model.layers import Tensors
from suite.pipeline.model.microbatch import LazyMiniBatches, ReplicaBatch, even_split_sizes, replica_share
from suite.train_spec import Dataset, TrainSpec


class SpecBatches:
    """The mini-batches of a run: those of a dataset in shuffled order, or those that a function returns.

    Other people's data may draw random numbers, so call it in the main thread (``loading.seeded``) unless the spec says
    ``prefetch``.
    """

    def __init__(self, spec: TrainSpec, rows: int, seed: int) -> None:
        """``rows`` is the size of a mini-batch of a dataset. Raises DataError for an empty or unusable one."""
        self._spec, self._rows, self._seed = spec, rows, seed
        self._is_dataset = not callable(spec.train) or hasattr(spec.train, "__getitem__")
        if self._is_dataset:
            _check_dataset("train", spec.train)
            self._epochs = ShuffledEpochs(len(cast(Dataset, spec.train)), 3, seed)
        if spec.valid is not None:
            _check_dataset("valid", spec.valid)

    def batch(self, step: int, replica: int, replicas: int, micro_batches: int) -> ReplicaBatch:
        """Returns the share of ``replica`` in the mini-batch of ``step``."""
        inputs, targets = self.whole(step)
        parts = even_split_sizes(len(inputs[0]), replicas * micro_batches)
        share = replica_share(len(parts), replica, replicas)
        divisor = self._divisor(targets, inputs)
        own = _cut(inputs, parts)[share], _cut(targets, parts)[share]
        return ReplicaBatch(*own, divisor, share.start, len(inputs[0]))

    def whole(self, step: int) -> tuple[Tensors, Tensors]:
        """Returns the inputs and targets of a whole mini-batch. Raises DataError when they are no mini-batch."""
        with self._seeded(step):
            if not self._is_dataset:
                function, what = cast(Callable[[int], Any], self._spec.train), f"step {step + 1}"
                return _checked(_called(lambda: function(step), f"the mini-batch of {what}"), what)
            rows = self._epochs.rows(step * self._rows, (step + 1) * self._rows)
            return self._read(cast(Dataset, self._spec.train), rows)

    def held_out(self, micro_batches: int, most: int | None = None) -> Sequence[ReplicaBatch]:
        """Returns the held-out rows in order, or the first ``most`` of them, in mini-batches of ``rows`` that are read
        on access."""
        total = len(cast(Dataset, self._spec.valid))
        return LazyMiniBatches(min(total, most or total), self._rows, lambda rows: self._held_out(rows, micro_batches))

    def check_prefetch(self) -> None:
        """Raises SettingError if the first mini-batch draws random numbers and the spec says ``prefetch``."""
        with seeded(self._seed):
            before = generator_states()
            self.whole(0)
            if self._spec.prefetch and generator_states() != before:
                raise SettingError(
                    "the data draws random numbers from the generators of torch, numpy or random, which layers use at "
                    "the same time: leave prefetch=True out, or draw from a generator of its own, seeded by the row"
                )

    def digest(self) -> str:
        """Returns a digest of the first mini-batch and of the layers' initial values: equal where the function returns
        the same."""
        hashed = hashlib.sha256()
        values = [parameter for layer in self._spec.layers for parameter in layer.parameters() if not parameter.is_meta]
        for tensor in (*(tensor for part in self.whole(0) for tensor in part), *values):
            hashed.update(bytes_of(tensor))
        return hashed.hexdigest()

    def _seeded(self, step: int) -> AbstractContextManager[None]:
        return nullcontext() if self._spec.prefetch else seeded(self._seed, step)

    def _held_out(self, rows: range, micro_batches: int) -> ReplicaBatch:
        with self._seeded(rows.start):
            inputs, targets = self._read(cast(Dataset, self._spec.valid), list(rows))
        parts = even_split_sizes(len(inputs[0]), micro_batches)
        return ReplicaBatch(_cut(inputs, parts), _cut(targets, parts), self._divisor(targets, inputs))

    def _read(self, data: Dataset, rows: list[int]) -> tuple[Tensors, Tensors]:
        collate = self._spec.collate or default_collate
        more = ", ..." if len(rows) > 3 else ""
        what = f"the mini-batch of rows {', '.join(map(str, rows[:3]))}{more}"
        return _checked(_called(lambda: collate(_rows_of(data, rows)), what), what)

    def _divisor(self, targets: Tensors, inputs: Tensors) -> float:
        divisor = units_of(self._spec, targets or inputs)
        if not divisor > 0:
            why = "all its targets are ignored" if self._spec.units is None else f"units returned {divisor}"
            raise DataError(f"a mini-batch has no units to take the mean over: {why}")
        return divisor


def _rows_of(data: Dataset, rows: list[int]) -> list[Any]:
    """Reads rows; all at once if the dataset has torch's ``__getitems__``."""
    several = getattr(data, "__getitems__", None)
    return several(rows) if several is not None else [data[row] for row in rows]


def _check_dataset(name: str, data: Any) -> None:
    if isinstance(data, DataLoader):
        raise DataError(f"{name} is a DataLoader; give its dataset, and its batch size as batch_size")
    if not hasattr(data, "__getitem__") or not hasattr(data, "__len__"):
        raise DataError(
            f"{name} is a {type(data).__name__}; give a dataset with len() and rows by index"
            + (", or a function that returns the mini-batch of a step" if name == "train" else "")
        )
    if _called(lambda: len(data), f"len() of {name}") == 0:
        raise DataError(f"{name} has no rows")


def _called(read: Callable[[], Any], what: str) -> Any:
    process = os.getpid()
    try:
        with torch.enable_grad():  # as loading.made_spec
            return read()
    except Exception as error:
        raise DataError(f"{what} cannot be read: {typed_line(error)}") from error
    finally:
        if os.getpid() != process:  # forked by the user's code, and not to go on as its parent does
            raised = sys.exc_info()[1]
            os._exit(bool(getattr(raised, "code", raised)))


def _checked(batch: Any, what: str) -> tuple[Tensors, Tensors]:
    """Returns inputs and targets as tuples of tensors. Raises DataError for anything else, and for unequal rows."""
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        kind = f"{type(batch).__name__} of {len(batch)}" if isinstance(batch, tuple | list) else type(batch).__name__
        raise DataError(f"{what} must be a pair (inputs, targets); it is a {kind}")
    inputs, targets = (tuple(part) if isinstance(part, tuple | list) else (part,) for part in batch)
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
    """Returns the micro-batches; empty tuples where there are no tensors, such as targets."""
    if not tensors:
        return [()] * len(parts)
    return list(zip(*(torch.split(tensor, parts) for tensor in tensors), strict=True))
