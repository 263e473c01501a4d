"""What a worker asks of a run's data: mini-batches on the stages that need them, held-out data, and baselines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from torch import Tensor

from suite.errors import DataError
from suite.exchange import broadcast
from suite.pipeline.model.microbatch import ReplicaBatch
from suite.pipeline.model.topology import RankCoord
from suite.settings import FrozenRecord, LoopSettings, PipelineSettings
from suite.training.validation import HeldOut

if TYPE_CHECKING:  # they import datasets, too early for a user's folder with a package of that name
    from suite.data.epochs import EpochBatches
    from suite.data.text.batching import TranslationBatches


class DataSource(Protocol):
    """Mini-batches for the stages that need them, None for all others."""

    def batch(self, step: int) -> ReplicaBatch | None:
        """Returns this worker's share of a step."""

    def held_out(self) -> HeldOut:
        """Returns the held-out mini-batches. All workers must call it."""

    has_held_out: bool
    """Whether there are any."""

    def notes(self) -> dict[str, Any]:
        """Returns the description of the data that checkpoints store."""

    def counts(self) -> dict[str, int]:
        """Returns the number of examples of each split. Call it on the last stage only."""

    is_thread_safe: bool
    """Whether ``batch`` may be called in another thread than the layers: it draws no global random numbers."""

    def check(self, notes: dict[str, Any]) -> str:
        """Returns a warning if a checkpoint may be of other data, empty otherwise; all workers must call it.

        Raises DataError when it certainly is.
        """
        return ""

    def baselines(self, held_out: HeldOut) -> dict[str, float]:
        """Returns scores without the model on the held-out mini-batches, by name, the one to beat first; empty if the
        data has none. Call it on the last stage only."""
        return {}

    def bytes_per_unit(self, held_out: HeldOut) -> float | None:
        """Returns the bytes of text of a held-out token; None if units are no text of one script. Call it on the last
        stage only."""
        return None


class PreparedSource(DataSource):
    """Prepared data, read where it is needed: inputs with the first cell, targets with the loss."""

    is_thread_safe, has_held_out = True, True
    by_group: ClassVar[bool] = False
    """Whether held-out scores are also reported by group, such as by language."""
    data_type: ClassVar[type[Any]]
    """What opens the folder of the data."""
    batches_type: ClassVar[type[Any]]
    """What makes mini-batches of them."""
    _data: Any = None
    _batches: EpochBatches | TranslationBatches | None = None

    def __init__(
        self, folder: Path, coord: RankCoord, settings: FrozenRecord, train: LoopSettings, pipeline: PipelineSettings
    ) -> None:
        """``settings`` are those of the data."""
        self._coord = coord
        if coord.is_first or coord.has_loss:
            self._data = self.data_type(folder)
            self._batches = self.batches_type(self._data, settings, train, pipeline.replicas, pipeline.micro_batches)

    def batch(self, step: int) -> ReplicaBatch | None:
        if self._batches is None:
            return None
        return self._batches.batch(step, self._coord.replica, self._coord.is_first, self._coord.has_loss)

    def held_out(self) -> HeldOut:
        coord = self._coord
        own = self._batches.held_out(coord.is_first, coord.has_loss) if self._batches is not None else None
        return held_out_on_all(own, self.by_group)


class TokenSource(PreparedSource):
    """Tokenized text. A checkpoint has the digest of its vocabulary."""

    @cached_property
    def _vocabulary(self) -> str | None:
        return self._data.digest if self._data is not None else None

    def notes(self) -> dict[str, Any]:
        return {"vocabulary": self._vocabulary}

    def check(self, notes: dict[str, Any]) -> str:
        if notes and self._vocabulary not in (None, notes.get("vocabulary")):
            raise DataError(
                "the checkpoint was trained with a different vocabulary than the prepared text, so its ids would stand "
                "for other words; restore the cache that it was trained with, or start a new run without it"
            )
        return ""


def labels(held_out: HeldOut) -> Iterator[Tensor]:
    return (target for batch in held_out.batches if batch for (target,) in batch.targets)


def held_out_on_all(batches: Sequence[ReplicaBatch] | None, by_group: bool = False) -> HeldOut:
    """Returns the mini-batches, or as many None as the first stage has mini-batches, and the names of their groups."""
    own = batches or ()
    names = {name for batch in own for name, _ in batch.groups} if by_group else set()
    count, groups = broadcast([len(own), sorted(names)])  # rank 0 is a first stage
    return HeldOut(batches if batches is not None else [None] * count, tuple(groups))
