"""The data of a TrainSpec, for the workers of its run."""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from experiments.base.data_source import DataSource, held_out_on_all
from experiments.custom.loading import digest
from suite.errors import DataError
from suite.exchange import all_gather
from suite.pipeline.model.layers import Tensors
from suite.pipeline.model.microbatch import ReplicaBatch
from suite.pipeline.model.topology import RankCoord
from suite.training.validation import HeldOut

if TYPE_CHECKING:
    from experiments.custom.experiment import CustomExperiment


class CustomSource(DataSource):
    def __init__(self, experiment: CustomExperiment, coord: RankCoord) -> None:
        self._experiment, self._coord, self.is_thread_safe = experiment, coord, experiment.spec.prefetch
        self._batches = experiment.batches() if coord.is_first or coord.has_loss else None
        self.has_held_out = experiment.spec.valid is not None

    def batch(self, step: int) -> ReplicaBatch | None:
        if self._batches is None:
            return None
        coord, pipeline = self._coord, self._experiment.pipeline
        batch = self._batches.batch(step, coord.replica, pipeline.replicas, pipeline.micro_batches)
        unused: list[Tensors] = [()] * len(batch)
        inputs, targets = batch.inputs if coord.is_first else unused, batch.targets if coord.has_loss else unused
        return replace(batch, inputs=inputs, targets=targets)

    def held_out(self) -> HeldOut:
        micro_batches, most = self._experiment.pipeline.micro_batches, self._experiment.train.valid_rows
        return held_out_on_all(None if self._batches is None else self._batches.held_out(micro_batches, most))

    def notes(self) -> dict[str, Any]:
        return {"source": digest(self._experiment.source)}

    def counts(self) -> dict[str, int]:
        sets = {"train": self._experiment.spec.train, "valid": self._experiment.spec.valid}
        return {name: len(data) for name, data in sets.items() if isinstance(data, Sized)}

    def check(self, notes: dict[str, Any]) -> str:
        """Compares what the function returns on all workers, which each call it themselves; returns a warning if its
        file has changed since the checkpoint."""
        digests = all_gather(self._batches.digest() if self._batches is not None else None)
        if len({each for each in digests if each is not None}) > 1:
            raise DataError(
                f"{self._experiment.source} returned different data in different workers; it must return the same in "
                "every process: read files, or draw from the generators of torch, numpy and random, which are seeded"
            )
        if notes and notes.get("source") != digest(self._experiment.source):
            return f"{self._experiment.source} has changed since this run began; the run continues with what it is now"
        return ""
