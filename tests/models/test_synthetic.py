"""The sleeping layer takes its time, forward and backward, and changes nothing; the convolutional one learns."""

import time

import pytest
import torch
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from models import resnet, synthetic
from models.loss import ClassificationLoss
from models.synthetic import SquareLoss, SyntheticLayer, no_sleep


def test_a_sleeping_layer_takes_its_time_and_hands_gradients_through():
    layer = SyntheticLayer(0.03, 0.03, 0.03)
    x = torch.ones(4, requires_grad=True)
    begin = time.perf_counter()
    y = layer(x)
    middle = time.perf_counter()
    SquareLoss()(y, x)[0].backward()
    end = time.perf_counter()
    weight = layer.weight.detach()
    assert torch.allclose(y, x * weight)
    assert torch.allclose(x.grad, 2 * x * weight**2)
    assert middle - begin >= 0.03
    assert end - middle >= 0.06


def test_on_the_meta_device_it_does_not_sleep():
    with torch.device("meta"):
        layer, x = SyntheticLayer(60.0, 60.0, 60.0), torch.ones(4)
    assert layer(x).shape == (4,)


@pytest.mark.parametrize("blocks", [1, 3])
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


def test_a_split_sleepers_gradients_are_true_and_slept_for_one_by_one(monkeypatch):
    slept = []
    monkeypatch.setattr(synthetic, "_sleep", slept.append)
    layer = SyntheticLayer(1.0, 2.0, 3.0, parameters=3)
    x = torch.randn(4, 2, requires_grad=True)
    y = layer(x)
    assert slept == [1.0]
    assert torch.allclose(y, x * layer.weight.mean())
    (of_x,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    assert slept == [1.0, 2.0]
    (of_weight,) = torch.autograd.grad(y.sum(), layer.weight, retain_graph=True)
    assert slept == [1.0, 2.0, 3.0]
    assert torch.allclose(of_x, layer.weight.mean().expand(4, 2))
    assert torch.allclose(of_weight, (x.sum() / 3).expand(3))
    slept.clear()
    layer(torch.randn(4, 2)).sum().backward()  # as on the first stage: both, though nobody needs the input's
    assert sorted(slept) == [1.0, 2.0, 3.0]


def test_pytorchs_split_backward_sleeps_for_each_part_alone(monkeypatch):
    slept = []
    monkeypatch.setattr(synthetic, "_sleep", slept.append)
    cell = torch.nn.Sequential(SyntheticLayer(1.0, 2.0, 3.0), SyntheticLayer(1.0, 2.0, 3.0))
    x = torch.randn(4, 2, requires_grad=True)
    y = cell(x)
    slept.clear()
    _, groups = stage_backward_input((y,), (torch.ones_like(y),), [x], cell.parameters())
    assert slept == [2.0, 2.0]
    stage_backward_weight(cell.parameters(), groups)
    assert slept == [2.0, 2.0, 3.0, 3.0]


def test_awake_nobody_sleeps(monkeypatch):
    slept = []
    monkeypatch.setattr(synthetic.time, "sleep", slept.append)
    layer = SyntheticLayer(1.0, 2.0, 3.0)
    with no_sleep():
        layer(torch.ones(2)).sum().backward()
    assert slept == []
    layer(torch.ones(2)).sum().backward()
    assert sorted(slept) == [1.0, 2.0, 3.0]
