"""An image set as a dataset of rows, for runs of your own layers."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Literal

from torch import Tensor

from suite.data.images.prepare import prepare_images
from suite.settings import ImageSettings


class ImageRows:
    """Rows (image, label): image (channels, size, size) float32 with mean 0 and deviation 1, label int64."""

    def __init__(
        self,
        source: str,
        split: Literal["train", "test"] = "train",
        size: int = 28,
        channels: int = 1,
        classes: int = 10,
    ) -> None:
        """Prepares ``source`` (``images.source`` in docs/settings.md) once, in ``GPIPE_CACHE`` or ``.cache``.

        Raises DataError for a set that is not available or does not have these sizes.
        """
        self._settings, self._split = ImageSettings(source=source, size=size), split
        cache, log = Path(os.environ.get("GPIPE_CACHE", ".cache")), partial(print, file=sys.stderr)
        self._data = prepare_images(self._settings, channels, classes, cache, log)

    def __len__(self) -> int:
        return self._data.info.counts[self._split]

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        return self.__getitems__([row])[0]

    def __getitems__(self, rows: list[int]) -> list[tuple[Tensor, Tensor]]:
        """Reads several rows at once, which is many times faster."""
        pixels = self._data.standardised(self._data.pixels(self._split, rows, self._settings))
        return list(zip(pixels, self._data.labels(self._split, rows), strict=True))
