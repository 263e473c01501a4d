"""Images for the workers of an image run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.base.data_source import PreparedSource
from suite.data.images.batches import ImageBatches
from suite.data.images.transforms import ImageData
from suite.errors import DataError
from suite.pipeline.model.topology import RankCoord
from suite.training.validation import HeldOut

if TYPE_CHECKING:
    from experiments.images.experiment import ImageExperiment


class ImageSource(PreparedSource):
    """Images for the first stage, labels for the last. A checkpoint has the name of its set: another one has other
    classes."""

    _data: ImageData | None = None

    def __init__(self, experiment: ImageExperiment, data: Path, coord: RankCoord) -> None:
        self._coord, pipeline = coord, experiment.pipeline
        if coord.is_first or coord.is_last:
            self._data = ImageData(data)
            self._batches = ImageBatches(
                self._data, experiment.images, experiment.train, pipeline.replicas, pipeline.micro_batches
            )

    def notes(self) -> dict[str, Any]:
        return {"images": self._data.info.source if self._data is not None else None}

    def counts(self) -> dict[str, int]:
        assert self._data is not None
        return self._data.info.counts

    def check(self, notes: dict[str, Any]) -> str:
        if notes and self._data is not None and notes.get("images") != self._data.info.source:
            raise DataError(
                f"the checkpoint was trained on {notes.get('images')}, not on {self._data.info.source}; start a new run"
            )
        return ""

    def baselines(self, held_out: HeldOut) -> dict[str, float]:
        assert self._data is not None
        return {"most_frequent_class": max(self._data.info.shares)}
