"""Models that are planned beside the named ones: a vision transformer, and three that a planner may get wrong."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from suite import TrainSpec

WIDTH, BLOCKS, CLASSES, ROWS = 512, 14, 500, 4096


class Noise:
    """Rows of the sizes of an image set, which the example would fetch."""

    def __init__(self, source: str, split: str = "train", size: int = 28, channels: int = 1) -> None:
        self.shape = channels, size, size

    def __len__(self) -> int:
        return 60_000

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        return torch.ones(self.shape), row % 10


class Rows:
    """Rows of ones and their class."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        return torch.ones(WIDTH), row % CLASSES


def vision() -> TrainSpec:
    """The vision transformer of examples/."""
    path = Path(__file__).parents[2] / "examples/vision_transformer.py"
    spec = importlib.util.spec_from_file_location("vision_transformer", path)
    assert spec is not None
    assert spec.loader is not None
    example: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    example.ImageRows = Noise
    return example.fashion()


class Block(nn.Module):
    """x + a small MLP of x."""

    def __init__(self, hidden: int = WIDTH) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, hidden), nn.GELU(), nn.Linear(hidden, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """(rows, width), the same."""
        return x + self.mlp(x)


def half() -> TrainSpec:
    """One layer has half of all weights."""
    return _spec([*[Block() for _ in range(5)], Block(BLOCKS * WIDTH), *[Block() for _ in range(9)], _head()])


class Stashing(Block):
    """A block whose input the last layer takes, too."""

    stashes = gpipe_stashes = ("first",)  # the name before, and now

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(rows, width) -> two of them."""
        return super().forward(x), x


class Popping(nn.Module):
    """Classes of the sum of two inputs."""

    pops = gpipe_pops = ("first",)

    def __init__(self) -> None:
        super().__init__()
        self.classes = _head()

    def forward(self, x: Tensor, first: Tensor) -> Tensor:
        """Two of (rows, width) -> (rows, classes)."""
        return self.classes(x + first)


def skip() -> TrainSpec:
    """A skip passes all layers."""
    return _spec([Stashing(), *[Block() for _ in range(BLOCKS)], Popping()])


def tied() -> TrainSpec:
    """The first and the last layer have one weight."""
    first, last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    last.weight = first.weight
    return _spec([first, *[Block() for _ in range(BLOCKS)], last])


def _head() -> nn.Module:
    return nn.Linear(WIDTH, CLASSES)


def _spec(layers: list[nn.Module]) -> TrainSpec:
    return TrainSpec(
        layers=layers, loss=nn.CrossEntropyLoss(), train=Rows(), batch_size=1024, stages=4, micro_batches=8, steps=100
    )
