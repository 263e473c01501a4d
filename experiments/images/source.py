"""Images and their classes for the workers of a run on images."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.base.data_source import PreparedSource, held_out_on_all
from suite.data.images.batches import ImageBatches
from suite.data.images.transforms import ImageData
from suite.errors import DataError
from suite.pipeline.model.topology import RankCoord
from suite.training.validation import HeldOut

if TYPE_CHECKING:
    from experiments.images.experiment import ImageExperiment


class ImageSource(PreparedSource):
    """Images for the first stage, labels for the last."""

    _batches: ImageBatches | None = None

    def __init__(self, experiment: ImageExperiment, data: Path, coord: RankCoord) -> None:
        self._coord, pipeline = coord, experiment.pipeline
        self._data = ImageData.open(data) if coord.is_first or coord.is_last else None
        if self._data is not None:
            self._batches = ImageBatches(
                self._data, experiment.images, experiment.train, pipeline.replicas, pipeline.micro_batches
            )

    def held_out(self) -> HeldOut:
        """The test images."""
        if self._batches is None:
            return held_out_on_all(None)
        return held_out_on_all(self._batches.held_out(self._coord.is_first, self._coord.is_last))

    def notes(self) -> dict[str, Any]:
        """The image set, which determines the classes."""
        return {"images": self._data.info.source if self._data is not None else None}

    def counts(self) -> dict[str, int]:
        """Images of each split."""
        assert self._data is not None
        return self._data.info.counts

    def check(self, notes: dict[str, Any]) -> str:
        """Compares image sets: another one has other classes."""
        if notes and self._data is not None and notes.get("images") != self._data.info.source:
            raise DataError(
                f"the checkpoint was trained on {notes.get('images')}, not on {self._data.info.source}; start a new run"
            )
        return ""

    def baselines(self, held_out: HeldOut) -> dict[str, float]:
        """The share of the most frequent class."""
        assert self._data is not None
        return {"most_frequent_class": max(self._data.info.shares)}

    def bytes_per_unit(self, held_out: HeldOut) -> None:
        """None: images are no text."""
