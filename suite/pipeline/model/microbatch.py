"""Splits a mini-batch of N examples into M micro-batches.

    N = 10, M = 4      | 0 1 2 | 3 4 5 | 6 7 | 8 9 |

Sizes differ by at most one; with fewer than M examples there are N micro-batches of one example.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from suite.errors import SettingError
from suite.pipeline.model.layers import Tensors


@dataclass(frozen=True)
class ReplicaBatch:
    """One replica's share of a mini-batch.

    ``inputs[i]`` are the inputs of the first stage, ``targets[i]`` those of the loss on the last. The summed loss of
    the whole mini-batch, over all replicas, is divided by ``divisor``, such as its tokens. ``offset`` is the number of
    micro-batches of the previous replicas, so that seeds do not depend on the number of replicas. ``rows`` are those of
    the whole mini-batch, given where metrics count rows and the divisor is something else. ``groups`` has the name and
    the divisor of each micro-batch of held-out data that is reported by group, such as by language.
    """

    inputs: Sequence[Tensors]
    targets: Sequence[Tensors]
    divisor: float
    offset: int = 0
    rows: int | None = None
    groups: Sequence[tuple[str, float]] = ()

    @property
    def units(self) -> float:
        """What metrics count of the whole mini-batch: its rows if given, otherwise its divisor."""
        return self.divisor if self.rows is None else float(self.rows)

    @property
    def share(self) -> float:
        """How many values its tensors have: a measure of this replica's work."""
        return float(sum(tensor.numel() for part in (*self.inputs, *self.targets) for tensor in part))

    def __post_init__(self) -> None:
        assert len(self.inputs) == len(self.targets), (len(self.inputs), len(self.targets))

    def __len__(self) -> int:
        return len(self.inputs)


def even_split_sizes(examples: int, micro_batches: int) -> list[int]:
    """Returns how many examples each micro-batch gets; the larger ones come first.

    Raises SettingError when there is no example or no micro-batch.
    """
    if examples < 1 or micro_batches < 1:
        raise SettingError(f"cannot cut {examples} examples into {micro_batches} micro-batches; both must be 1 or more")
    count = min(examples, micro_batches)
    base, larger = divmod(examples, count)
    return [base + 1] * larger + [base] * (count - larger)


def replica_share(micro_batches: int, replica: int, replicas: int) -> slice:
    """Returns which of a mini-batch's micro-batches are a replica's: a contiguous part. The parts differ by at most
    one; of fewer than there are replicas, the first replicas have one each."""
    begin, end = (max(min(at, micro_batches), -(-micro_batches * at // replicas)) for at in (replica, replica + 1))
    return slice(begin, end)


class LazyMiniBatches(Sequence[ReplicaBatch]):
    """Mini-batches that are read on access, so a test set need not fit in memory."""

    def __init__(self, total: int, size: int, read: Callable[[range], ReplicaBatch]) -> None:
        """``read`` gets ``size`` of ``total`` rows, the last time the rest of them."""
        self._rows = [range(first, min(total, first + size)) for first in range(0, total, size)]
        self._read = read

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, at: Any) -> Any:
        return self._read(self._rows[at])
