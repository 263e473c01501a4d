"""An image set as a dataset of rows, for runs of your own layers."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from torch import Tensor

from suite.data.images.prepare import prepare_images
from suite.settings import ImageSettings


class ImageRows:
    """Rows (image, label): image (channels, size, size) float32 with mean 0 and deviation 1, label int64."""

    def __init__(
        self, source: str, split: Literal["train", "test"] = "train", size: int = 28, channels: int = 1,
        classes: int = 10, cache: Path = Path(".cache"),
    ) -> None:  # fmt: skip
        """Prepares ``source`` (``images.source`` in docs/settings.md) in ``cache``, once.

        Raises DataError for a set that is not available or does not have these sizes.
        """
        self._settings, self._split = ImageSettings(source=source, size=size), split
        self._data = prepare_images(self._settings, channels, classes, cache, log=print)

    def __len__(self) -> int:
        return self._data.info.counts[self._split]

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        """Reads one row."""
        pixels = self._data.standardised(self._data.pixels(self._split, [row], self._settings))
        return pixels[0], self._data.labels(self._split, [row])[0]
