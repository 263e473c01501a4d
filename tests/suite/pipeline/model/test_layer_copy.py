"""Copies of layers have all that the layer carries, and none of its tensors."""

from functools import partial

import pytest
import torch
from torch import nn

from suite.pipeline.model.layer_copy import captured, copied, held

TABLE = nn.Linear(2, 2)


class Scaled(nn.Parameter):
    pass


class Slots:
    __slots__ = ("inside",)


def copy(layer):
    return copied(layer, torch.clone)


def test_a_parameter_keeps_its_class_its_attributes_and_its_hooks():
    layer = nn.Linear(2, 2)
    layer.weight = Scaled(layer.weight.detach())
    layer.weight.mark, layer.bias.requires_grad = [1], False
    layer.weight.register_hook(lambda gradient: gradient * 3)
    made = copy(layer)
    assert (type(made.weight), made.weight.mark, made.bias.requires_grad) == (Scaled, [1], False)
    assert made.weight.equal(layer.weight)
    for each in (layer, made):
        each(torch.ones(1, 2)).sum().backward()
    assert made.weight.grad.equal(layer.weight.grad)
    assert made.weight.data_ptr() != layer.weight.data_ptr()


def test_a_tensor_with_several_names_stays_one():
    layer = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    layer[1].weight = layer[0].weight
    layer.register_buffer("a", torch.ones(2))
    layer.register_buffer("b", layer.a)
    layer.kept = {"list": [layer.a]}
    made = copy(layer)
    assert made[1].weight is made[0].weight
    assert made.a is made.b is made.kept["list"][0]
    assert made.a is not layer.a


def test_a_tensor_with_a_graph_is_copied_without_it():
    layer = nn.utils.weight_norm(nn.Linear(2, 2))
    assert layer.weight.grad_fn is not None
    made = copied(layer, lambda tensor: tensor.to("meta"))
    assert made(torch.ones(1, 2, device="meta")).shape == (1, 2)
    assert made.weight_g.is_meta


@pytest.mark.parametrize("hide", ["list", "dict", "partial", "method", "slots", "attribute"])
def test_what_a_layer_reaches_is_found_with_the_path_to_it(hide):
    layer, other, slots = nn.Linear(2, 2), nn.Linear(3, 3), Slots()
    slots.inside = other
    plain = nn.Identity()
    plain.__dict__["other"] = other
    layer.held = {
        "list": [[other]], "dict": {"a": other}, "partial": partial(print, other), "method": other.forward,
        "slots": slots, "attribute": [plain],
    }[hide]  # fmt: skip
    (path,) = [path for path, value in held(layer) if value is other]
    assert path.startswith("held"), path


def test_what_functions_have_captured_is_found():
    layer, other = nn.Linear(2, 2), nn.Linear(3, 3)
    layer.register_forward_hook(lambda module, inputs, output: output + other.bias)
    assert [value for _, value in captured(layer)] == [other, other.weight, other.bias]
    assert not [*captured(nn.Linear(2, 2))]

    class Reads(nn.Module):
        def forward(self, x):
            return TABLE(x)

    assert next(captured(Reads())) == ("the global TABLE", TABLE)
