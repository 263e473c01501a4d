"""A plain residual network of convolutions, as a list of layers: uneven in time and in bytes, unlike a Transformer.

stem | blocks of width w | blocks of 2w, half the size | blocks of 4w, a quarter | pool and classify
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def layers(width: int, blocks: int, classes: int) -> list[nn.Module]:
    """Returns a stem, three groups of ``blocks`` residual blocks, and the classifier."""
    stack: list[nn.Module] = [Stem(width)]
    for group in range(3):
        for at in range(blocks):
            narrow = width << max(0, group - 1) if at == 0 else width << group
            stack.append(Block(narrow, width << group, stride=2 if group and at == 0 else 1))
    return [*stack, Classifier(width << 2, classes)]


class Layer(nn.Module):
    """A layer whose modules initialise themselves."""

    def reset_parameters(self) -> None:
        for child in self.children():
            child.reset_parameters()  # type: ignore[operator]


class Stem(Layer):
    """Images (batch, 3, height, width) -> (batch, channels, height, width)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, width, 3, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        return torch.relu(self.convolution(images))


class Block(Layer):
    """Two convolutions with a shortcut: the identity, or a projection where width or size changes."""

    def __init__(self, width: int, wider: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, wider, 3, stride=stride, padding=1)
        self.second = nn.Conv2d(wider, wider, 3, padding=1)
        self.project = nn.Conv2d(width, wider, 1, stride=stride) if (width, stride) != (wider, 1) else None

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.project is None else self.project(x)
        return torch.relu(shortcut + self.second(torch.relu(self.first(x))))


class Classifier(Layer):
    """Mean over places, then scores of the classes."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.scores = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.scores(x.mean((2, 3)))
