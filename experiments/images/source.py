"""Images for the workers of an image run."""

from __future__ import annotations

from typing import Any

import torch

from experiments.base.data_source import PreparedSource, labels
from suite.data.images.batches import ImageBatches
from suite.data.images.transforms import ImageData
from suite.errors import DataError
from suite.training.validation import HeldOut


class ImageSource(PreparedSource):
    """Images for the first stage, labels for the last. A checkpoint has the names of its set and its classes."""

    data_type, batches_type = ImageData, ImageBatches
    _data: ImageData

    def notes(self) -> dict[str, Any]:
        return {"images": self._data.info.source, "classes": self._data.classes} if self._data is not None else {}

    def counts(self) -> dict[str, int]:
        return self._data.info.counts

    def check(self, notes: dict[str, Any]) -> str:
        if notes and any(notes.get(name, value) != value for name, value in self.notes().items()):
            raise DataError(
                f"the checkpoint was trained on {notes.get('images')}, and not on {self._data.info.source} with its "
                "present classes; restore these, or start a new run"
            )
        return ""

    def baselines(self, held_out: HeldOut) -> dict[str, float]:
        mini_batches = self._batches.held_out(inputs=False)  # type: ignore[union-attr]
        counts = torch.cat([*labels(HeldOut(mini_batches))]).bincount()
        return {"most_frequent_class": float(counts.max() / counts.sum())}
