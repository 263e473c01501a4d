"""The convolutional network has its shapes, and learns."""

import pytest
import torch

from models import resnet
from models.loss import ClassificationLoss


@pytest.mark.parametrize("blocks", [1, 2])
def test_the_convolutional_network_halves_places_and_doubles_width(blocks):
    stack = resnet.layers(width=4, blocks=blocks, classes=10)
    assert len(stack) == 3 * blocks + 2
    x = torch.randn(2, 3, 32, 32)
    shapes = []
    for layer in stack:
        x = layer(x)
        shapes.append(tuple(x.shape[1:]))
    assert shapes[blocks] == (4, 32, 32)
    assert shapes[2 * blocks] == (8, 16, 16)
    assert shapes[3 * blocks] == (16, 8, 8)
    objective, _ = ClassificationLoss(0.0)(x, torch.tensor([1, 2]))
    objective.backward()
    assert all(p.grad is not None for layer in stack for p in layer.parameters())
