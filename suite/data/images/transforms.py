"""Prepared images: two splits as tables of ``datasets``, and the facts that a model needs about them.

<folder>/images.json  train/  test/  manifest.json        a set on the hub stays in the hub's own cache
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from PIL import Image
from torch import Tensor

from suite.data.images.sets import TEST, TRAIN, read_hub
from suite.errors import DataError
from suite.settings import ImageSettings

INFO_FILE = "images.json"
FILE = "file"
"""The column of file names, where a set has one."""


@dataclass(frozen=True)
class ImageSetInfo:
    """A prepared set. ``mean`` and ``deviation`` are per channel, of the training pixels from 0 to 1."""

    source: str
    hub: bool
    image_column: str
    label_column: str
    channels: int
    classes: int
    counts: dict[str, int]
    prints: dict[str, str]
    """The fingerprint of each split in ``datasets``."""
    mean: tuple[float, ...]
    deviation: tuple[float, ...]


class ImageData:
    """Images ready to train on."""

    def __init__(self, folder: Path) -> None:
        """Opens a prepared folder; the splits stay on disk. The caller must check that the folder is valid."""
        read: dict[str, Any] = json.loads((folder / INFO_FILE).read_text())
        self.info = ImageSetInfo(**read | {name: tuple(read[name]) for name in ("mean", "deviation")})
        if not self.info.hub:
            self.splits = {name: datasets.load_from_disk(str(folder / name)) for name in (TRAIN, TEST)}
            return
        self.splits = read_hub(self.info.source)[0]
        if fingerprints(self.splits) != self.info.prints:
            raise DataError(
                f"{self.info.source} on the hub has changed since {folder} was prepared; delete that folder to use the "
                "new version"
            )

    @property
    def classes(self) -> list[str] | None:
        """The name of each label, if the set has names."""
        return getattr(self.splits[TRAIN].features[self.info.label_column], "names", None)

    def labels(self, split: str, rows: Sequence[int]) -> Tensor:
        """Returns the labels of rows, (len(rows),) int64."""
        column = self.splits[split].select_columns([self.info.label_column])
        return torch.tensor(column[list(rows)][self.info.label_column], dtype=torch.int64)

    def pixels(self, split: str, rows: Sequence[int], settings: ImageSettings, parts: Tensor | None = None) -> Tensor:
        """Returns (len(rows), channels, size, size) uint8; with ``parts``, of a ``random_resized_crop`` of each image.

        Raises DataError for a damaged image. ``prepare_images`` has checked the sizes.
        """
        mode = "L" if self.info.channels == 1 else "RGB"  # before they are resized: palettes have no values between
        images = [own.convert(mode) for own in decode_images(self.splits[split], self.info.image_column, rows, split)]
        if parts is not None:
            images = [random_resized_crop(*pair, settings.size) for pair in zip(images, parts.tolist(), strict=True)]
        squares = [np.asarray(resize_and_center_crop(image, settings.size)) for image in images]
        stacked = torch.from_numpy(np.stack(squares))
        return stacked.unsqueeze(1) if self.info.channels == 1 else stacked.permute(0, 3, 1, 2)

    def standardised(self, pixels: Tensor) -> Tensor:
        """Returns pixels as floats with mean 0 and deviation 1 over the training set."""
        shape = (1, -1, 1, 1)
        mean, deviation = torch.tensor(self.info.mean).view(shape), torch.tensor(self.info.deviation).view(shape)
        return (pixels.float() / 255 - mean) / deviation


def fingerprints(splits: dict[str, Any]) -> dict[str, str]:
    """Returns the fingerprint of each split in ``datasets``."""
    return {name: str(rows._fingerprint) for name, rows in splits.items()}


def image_name(table: Any, row: int, split: str) -> str:
    """Returns the file of an image, or its place in a set without file names."""
    return table.select_columns([FILE])[row][FILE] if FILE in table.column_names else f"{split} image {row}"


def decode_images(table: Any, column: str, rows: Sequence[int], split: str) -> list[Image.Image]:
    """Returns the images of a table's rows. Raises DataError naming the first damaged one."""
    images = table.select_columns([column])
    try:
        return list(images[list(rows)][column])
    except (OSError, SyntaxError, ValueError):
        for row in rows:
            try:
                images[row]
            except (OSError, SyntaxError, ValueError) as error:
                name = image_name(table, row, split)
                raise DataError(f"{name} is damaged ({error}); fetch the set again, or remove the image") from error
        raise


def resize_and_center_crop(image: Image.Image, size: int) -> Image.Image:
    """Returns a square image whose shorter side is resized to ``size``, without the ends of the longer one."""
    if image.size == (size, size):
        return image
    scale = size / min(image.size)
    width, height = (max(size, round(side * scale)) for side in image.size)
    left, top = (width - size) // 2, (height - size) // 2
    return image.resize((width, height), Image.Resampling.BILINEAR).crop((left, top, left + size, top + size))


def random_resized_crop(image: Image.Image, chances: Sequence[float], size: int) -> Image.Image:
    """Returns a crop of 8% to 100% of an image's area, with sides 3:4 to 4:3, resized to a square (Szegedy et al.,
    2015).

    ``chances`` are four numbers from 0 to 1: for the area, the aspect ratio, and the horizontal and vertical position.
    """
    area = (0.08 + 0.92 * chances[0]) * image.width * image.height
    ratio = (3 / 4) * (16 / 9) ** chances[1]
    width = min(image.width, max(1, round((area * ratio) ** 0.5)))
    height = min(image.height, max(1, round((area / ratio) ** 0.5)))
    left, top = round(chances[2] * (image.width - width)), round(chances[3] * (image.height - height))
    return image.resize((size, size), Image.Resampling.BILINEAR, box=(left, top, left + width, top + height))
