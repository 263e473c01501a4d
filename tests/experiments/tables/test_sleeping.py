"""The sleeping layer takes its time, forward and backward, and changes nothing."""

from types import SimpleNamespace

import torch
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from experiments.tables import sleeping
from experiments.tables.sleeping import SquareError, SyntheticLayer


def test_on_the_meta_device_it_does_not_sleep():
    with torch.device("meta"):
        layer, x = SyntheticLayer(60.0, 60.0, 60.0), torch.ones(4)
    assert layer(x).shape == (4,)


def test_a_split_sleepers_gradients_are_true_and_slept_for_one_by_one(monkeypatch):
    slept = []
    monkeypatch.setattr(sleeping, "time", SimpleNamespace(sleep=slept.append))
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
    x = x.detach()
    y = layer(x)
    SquareError()(y, torch.ones(()))[0].backward()  # as on the first stage: both, though nobody needs the input's
    assert sorted(slept) == [1.0, 2.0, 3.0]
    assert torch.allclose(layer.weight.grad, (2 * (y - 1) * x).sum().expand(3) / 3)


def test_pytorchs_split_backward_sleeps_for_each_part_alone(monkeypatch):
    slept = []
    monkeypatch.setattr(sleeping, "time", SimpleNamespace(sleep=slept.append))
    cell = torch.nn.Sequential(SyntheticLayer(1.0, 2.0, 3.0), SyntheticLayer(1.0, 2.0, 3.0))
    x = torch.randn(4, 2, requires_grad=True)
    y = cell(x)
    slept.clear()
    _, groups = stage_backward_input((y,), (torch.ones_like(y),), [x], cell.parameters())
    assert slept == [2.0, 2.0]
    stage_backward_weight(cell.parameters(), groups)
    assert slept == [2.0, 2.0, 3.0, 3.0]
