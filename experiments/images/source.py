"""Images for the workers of an image run."""

from __future__ import annotations

from typing import Any

from experiments.base.data_source import PreparedSource
from suite.data.images.batches import ImageBatches
from suite.data.images.transforms import ImageData
from suite.errors import DataError
from suite.training.validation import HeldOut


class ImageSource(PreparedSource):
    """Images for the first stage, labels for the last. A checkpoint has the name of its set: another one has other
    classes."""

    data_type, batches_type = ImageData, ImageBatches
    _data: ImageData | None = None

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
