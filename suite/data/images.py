"""Prepared images: two splits as tables of ``datasets``, and what a model must know of them.

<folder>/images.json  train/  test/  manifest.json        a set on the hub stays in the hub's own cache
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from suite.data.image_sets import TEST, TRAIN, read_hub
from suite.errors import DataError
from suite.settings import ImageSettings

FACTS = "images.json"


@dataclass(frozen=True)
class Facts:
    """Of one prepared set. ``mean`` and ``deviation`` are of the training pixels, 0 to 1, a channel each."""

    source: str
    hub: bool
    image_column: str
    label_column: str
    channels: int
    classes: int
    counts: dict[str, int]
    prints: dict[str, str]
    """What ``datasets`` tells each split apart by."""
    shares: tuple[float, ...]
    """Of each class in the test split."""
    mean: tuple[float, ...]
    deviation: tuple[float, ...]


@dataclass(frozen=True)
class ImageData:
    """Images ready to train on."""

    facts: Facts
    splits: dict[str, Any]

    @classmethod
    def open(cls, folder: Path) -> ImageData:
        """Opens a prepared folder; the splits stay on disk. Whether it is whole is the caller's to check."""
        read: dict[str, Any] = json.loads((folder / FACTS).read_text())
        facts = Facts(**read | {name: tuple(read[name]) for name in ("shares", "mean", "deviation")})
        if facts.hub:
            splits = read_hub(facts.source)[0]
            if prints_of(splits) != facts.prints:
                raise DataError(
                    f"{facts.source} on the hub is not what it was when {folder} was prepared; delete that folder to "
                    "go on with what it is now"
                )
            return cls(facts, splits)
        import datasets

        return cls(facts, {name: datasets.load_from_disk(str(folder / name)) for name in (TRAIN, TEST)})

    def write_facts(self, folder: Path) -> None:
        """Writes what ``open`` reads."""
        (folder / FACTS).write_text(json.dumps(asdict(self.facts), indent=1))

    def labels(self, split: str, rows: Sequence[int]) -> Tensor:
        """Returns (len(rows),) int64."""
        column = self.splits[split].select_columns([self.facts.label_column])
        return torch.tensor(column[list(rows)][self.facts.label_column], dtype=torch.int64)

    def pixels(self, split: str, rows: Sequence[int], settings: ImageSettings, parts: Tensor | None = None) -> Tensor:
        """Returns (len(rows), channels, size, size) uint8; with ``parts``, of each image a part (see ``part_of``).

        Raises DataError for an image that is not as it must be.
        """
        images = decoded(self.splits[split], self.facts.image_column, rows, f"{split} image")
        mode = "L" if self.facts.channels == 1 else "RGB"
        made = []
        for at, image in enumerate(images):
            if parts is not None:
                image = part_of(image, parts[at].tolist(), settings.size)
            made.append(np.asarray(fitted(image, settings, f"{split} image {rows[at]}").convert(mode)))
        stacked = torch.from_numpy(np.stack(made))
        return stacked.unsqueeze(1) if self.facts.channels == 1 else stacked.permute(0, 3, 1, 2)

    def standardised(self, pixels: Tensor) -> Tensor:
        """Returns pixels as floats of mean 0 and deviation 1 over the training set."""
        shape = (1, -1, 1, 1)
        mean, deviation = torch.tensor(self.facts.mean).view(shape), torch.tensor(self.facts.deviation).view(shape)
        return (pixels.float() / 255 - mean) / deviation


def prints_of(splits: dict[str, Any]) -> dict[str, str]:
    """Returns what ``datasets`` tells splits apart by."""
    return {name: str(rows._fingerprint) for name, rows in splits.items()}


def decoded(table: Any, column: str, rows: Sequence[int], what: str) -> list[Image.Image]:
    """Returns images of a table. Raises DataError naming the first that is damaged."""
    table = table.select_columns([column])
    try:
        return list(table[list(rows)][column])
    except (OSError, SyntaxError, ValueError):
        for row in rows:
            try:
                table[row]
            except (OSError, SyntaxError, ValueError) as error:
                raise DataError(f"{what} {row} is damaged ({error}); fetch the set again, or leave it out") from error
        raise


def fitted(image: Image.Image, settings: ImageSettings, which: str) -> Image.Image:
    """Returns an image of the size asked for. Raises DataError where it must have it already and has not."""
    size = settings.size
    if image.size == (size, size):
        return image
    if settings.fit == "exact":
        raise DataError(
            f"{which} of {settings.source} is {image.height} x {image.width} pixels, images.size is {size}; "
            f"set images.size, or images.fit=resize to have every image made {size} x {size}"
        )
    scale = size / min(image.size)
    width, height = (max(size, round(side * scale)) for side in image.size)
    left, top = (width - size) // 2, (height - size) // 2
    return image.resize((width, height), Image.Resampling.BILINEAR).crop((left, top, left + size, top + size))


def part_of(image: Image.Image, chances: Sequence[float], size: int) -> Image.Image:
    """Returns 8% to 100% of an image's area, its sides 3:4 to 4:3, as a square (Szegedy et al., 2015).

    ``chances`` are four numbers from 0 to 1: of the area, the ratio, and the place across and down.
    """
    area = (0.08 + 0.92 * chances[0]) * image.width * image.height
    ratio = (3 / 4) * (16 / 9) ** chances[1]
    width = min(image.width, max(1, round((area * ratio) ** 0.5)))
    height = min(image.height, max(1, round((area / ratio) ** 0.5)))
    left, top = round(chances[2] * (image.width - width)), round(chances[3] * (image.height - height))
    return image.resize((size, size), Image.Resampling.BILINEAR, box=(left, top, left + width, top + height))
