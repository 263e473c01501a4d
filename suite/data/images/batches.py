"""Mini-batches of images, and their augmentation by crop, flip and cutout.

An image's random numbers depend on the seed and on its place in the run's sequence of images.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from suite.data.epochs import EpochBatches, ShuffledEpochs
from suite.data.images.sets import TEST, TRAIN
from suite.data.images.transforms import ImageData
from suite.pipeline.model.rng import mix
from suite.settings import ImageSettings, ImageTrainSettings

_CHANCES = 7
"""Random numbers per image: 0 to 3 for the area crop, or 0 and 1 for the shift; 4 for the flip; 5 and 6 for cutout."""


class ImageBatches(EpochBatches):
    """A micro-batch is images (B, channels, size, size) of floats and labels (B,) int64; a unit is an image. Held out
    are the test images as they are, or ``train.test_images`` evenly spaced ones: sets may be sorted by class."""

    setting = "train.batch_images"

    def __init__(
        self, data: ImageData, images: ImageSettings, train: ImageTrainSettings, replicas: int, micro_batches: int
    ) -> None:
        counts, epochs = data.info.counts, ShuffledEpochs(data.info.counts[TRAIN], 3, train.seed)
        held_out = min(train.test_images or counts[TEST], counts[TEST])
        self._held_out = [at * counts[TEST] // held_out for at in range(held_out)]
        super().__init__(epochs, train.batch_images, held_out, 1, replicas, micro_batches)
        self._data, self._images, self._seed = data, images, train.seed

    def _read(self, rows: Sequence[int], step: int | None, places: slice) -> tuple[Callable[[], Tensor], ...]:
        if step is None:
            tests = [self._held_out[row] for row in rows]
            return (
                lambda: self._data.standardised(self._data.pixels(TEST, tests, self._images)),
                lambda: self._data.labels(TEST, tests),
            )
        generator = torch.Generator().manual_seed(mix(4, self._seed, step))
        chances = torch.rand(self._size, _CHANCES, generator=generator)[places]
        return lambda: self._augmented(rows, chances), lambda: self._data.labels(TRAIN, rows)

    def _augmented(self, rows: Sequence[int], chances: Tensor) -> Tensor:
        settings = self._images
        parts = chances[:, :4] if settings.crop == "random_resized_crop" else None
        images = self._data.standardised(self._data.pixels(TRAIN, rows, settings, parts))
        if settings.crop == "random_shift":
            images = random_shift(images, chances[:, :2])
        if settings.flip:
            images = torch.where((chances[:, 4] < 0.5).view(-1, 1, 1, 1), images.flip(3), images)
        return cutout(images, chances[:, 5:7], settings.cutout) if settings.cutout else images


def random_shift(images: Tensor, chances: Tensor) -> Tensor:
    """Shifts each image by up to an eighth of its size in both axes and fills the border with 0, the mean."""
    size = images.shape[-1]
    margin = size // 8
    padded = F.pad(images, (margin,) * 4)
    offsets = (chances * (2 * margin + 1)).long().clamp(max=2 * margin)
    moved = [padded[at, :, y : y + size, x : x + size] for at, (x, y) in enumerate(offsets.tolist())]
    return torch.stack(moved)


def cutout(images: Tensor, chances: Tensor, side: int) -> Tensor:
    """Sets a square of each image to 0, the mean. Its centre is anywhere in the image (DeVries and Taylor, 2017)."""
    size = images.shape[-1]
    places = torch.arange(size)
    begin = (chances * size).long().clamp(max=size - 1) - side // 2
    inside = (places >= begin.unsqueeze(-1)) & (places < begin.unsqueeze(-1) + side)  # (N, 2, size)
    square = inside[:, 1].unsqueeze(2) & inside[:, 0].unsqueeze(1)
    return images.masked_fill(square.unsqueeze(1), 0.0)
