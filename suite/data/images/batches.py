"""Mini-batches of images: selection, micro-batches, and augmentation by crop, flip and cutout.

They depend only on (seed, step): the run's images are one endless sequence of shuffled epochs, a step is the next slice
of it, and an image's random numbers depend on its position there. The number of stages and replicas has no influence.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from suite.data.epochs import ShuffledEpochs
from suite.data.images.sets import TEST, TRAIN
from suite.data.images.transforms import ImageData
from suite.errors import SettingError
from suite.pipeline.model.layers import Tensors
from suite.pipeline.model.microbatch import LazyMiniBatches, MiniBatch, replica_share, sizes
from suite.pipeline.model.rng import mix
from suite.settings import ImageSettings, ImageTrainSettings

_CHANCES = 7
"""Random numbers per image: 0 to 3 for the area crop, or 0 and 1 for the shift; 4 for the flip; 5 and 6 for cutout."""


class ImageBatches:
    """The training mini-batches of a run, by step and replica, and its held-out mini-batches."""

    def __init__(
        self, data: ImageData, images: ImageSettings, train: ImageTrainSettings, replicas: int, micro_batches: int
    ) -> None:
        """Raises SettingError when a mini-batch has fewer images than there are replicas."""
        if train.batch_images < replicas:
            raise SettingError(
                f"train.batch_images={train.batch_images} is too small for {replicas} replicas; "
                f"raise it to {replicas} or more"
            )
        self._data, self._images, self._train = data, images, train
        self._replicas, self._micro_batches = replicas, micro_batches
        self._epochs = ShuffledEpochs(data.info.counts[TRAIN], 3, train.seed)

    def batch(self, step: int, replica: int, inputs: bool = True, targets: bool = True) -> MiniBatch:
        """Returns the share of ``replica`` in the mini-batch of ``step``.

        A micro-batch is inputs (images (B, channels, size, size),) of floats and targets (labels (B,) int64,). Without
        ``inputs``, or without ``targets``, these are empty. The weight is ``train.batch_images``.
        """
        count = self._train.batch_images
        parts, share = replica_share(count, replica, self._replicas, self._micro_batches)
        own, first, offset = parts[share], sum(parts[: share.start]), share.start
        rows = self.rows(step)[first : first + sum(own)]
        images = self._augmented(rows, self._chances(step)[first : first + sum(own)]) if inputs else None
        labels = self._data.labels(TRAIN, rows) if targets else None
        return MiniBatch(_cut(images, own), _cut(labels, own), float(count), offset)

    def rows(self, step: int) -> list[int]:
        """Returns the rows of a step's training images, in order."""
        count = self._train.batch_images
        return self._epochs.rows(step * count, (step + 1) * count)

    def held_out(self, inputs: bool = True, targets: bool = True) -> Sequence[MiniBatch]:
        """Returns the test images in order, or the first ``train.test_images`` of them, without augmentation."""
        total = min(self._train.test_images or self._data.info.counts[TEST], self._data.info.counts[TEST])
        size = self._train.batch_images
        rows = [range(first, min(total, first + size)) for first in range(0, total, size)]
        return LazyMiniBatches(rows, lambda batch_rows: self._test_batch(batch_rows, inputs, targets))

    def _test_batch(self, rows: range, inputs: bool, targets: bool) -> MiniBatch:
        parts = sizes(len(rows), self._micro_batches)
        images = self._data.standardised(self._data.pixels(TEST, rows, self._images)) if inputs else None
        labels = self._data.labels(TEST, rows) if targets else None
        return MiniBatch(_cut(images, parts), _cut(labels, parts), float(len(rows)))

    def _chances(self, step: int) -> Tensor:
        """Returns random numbers from 0 to 1 for each image of a step, (N, _CHANCES)."""
        generator = torch.Generator().manual_seed(mix(4, self._train.seed, step))
        return torch.rand(self._train.batch_images, _CHANCES, generator=generator)

    def _augmented(self, rows: list[int], chances: Tensor) -> Tensor:
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


def _cut(rows: Tensor | None, parts: list[int]) -> list[Tensors]:
    """Returns micro-batches of so many rows; empty ones without rows."""
    return [()] * len(parts) if rows is None else [(part,) for part in rows.split(parts)]
