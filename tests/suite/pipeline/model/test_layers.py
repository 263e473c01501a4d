"""What the pipeline reads off a layer list."""

import pytest
import torch
from torch import nn

from models import amoebanet
from models.transformer import TransformerShape, layers
from suite.pipeline.model.layers import count_parameters, materialize, meta_device, structure_key
from tests.suite.pipeline.toy import Middle, toy_layers


@pytest.mark.parametrize(
    "build",
    [
        lambda: layers(TransformerShape(1, 8, 16, 1, 32)),
        lambda: amoebanet.layers(amoebanet.AmoebaNetShape(3, 8, classes=4)),
        lambda: [nn.Embedding(3, 4)],
    ],
)
def test_layers_built_without_values_are_those_built_with_some(build):
    with meta_device():
        made = build()
    with torch.device("meta"):
        initialised = build()
    assert [*map(structure_key, made)] == [*map(structure_key, initialised)]
    for layer, other in zip(made, initialised, strict=True):
        assert all(tensor.is_meta for tensor in layer.parameters())
        state, expected = (materialize(one, 3, torch.device("cpu")).state_dict() for one in (layer, other))
        assert all(torch.equal(state[name], expected[name]) for name in expected)


def test_what_is_built_beside_the_meta_device_has_initial_values():
    with meta_device():
        table = nn.Embedding(4, 5, device="cpu")
        noise = torch.zeros(4, device="cpu").normal_()
    assert table.weight.std() > 0.1
    assert noise.std() > 0.1


def test_layers_of_one_kind_share_a_structure_and_others_do_not():
    with torch.device("meta"):
        encoder, other = layers(TransformerShape(2, 8, 16, 1, 32)), layers(TransformerShape(2, 8, 24, 1, 32))
    assert structure_key(encoder[1]) == structure_key(encoder[2])
    kinds = [encoder[0], encoder[1], other[1], encoder[3], encoder[4], encoder[-1]]
    assert len({structure_key(layer) for layer in kinds}) == len(kinds)


def test_an_attribute_that_changes_the_function_changes_the_structure():
    class Scaled(nn.Module):
        def __init__(self, by):
            super().__init__()
            self.by = by

    assert structure_key(Scaled(2.0)) != structure_key(Scaled(3.0))
    assert structure_key(Scaled([1])) != structure_key(Scaled([1]))  # unknown to us: never taken for alike


def test_a_declared_structure_replaces_attributes_and_nothing_else():
    class Indexed(nn.Module):
        def __init__(self, index, width=3, structure="block"):
            super().__init__()
            self.index, self.config, self.linear, self.gpipe_structure = index, [], nn.Linear(width, 3), structure

    assert structure_key(Indexed(0)) == structure_key(Indexed(1))
    frozen, popping = Indexed(1), Indexed(1)
    frozen.linear.weight.requires_grad_(False)
    popping.gpipe_pops = ("skip",)
    others = [Indexed(0), Indexed(0, width=4), Indexed(0, structure="other"), frozen, popping, nn.Linear(3, 3)]
    assert len({structure_key(layer) for layer in others}) == len(others)
    undeclared = [Indexed(0, structure=None), Indexed(1, structure=None)]
    assert structure_key(undeclared[0]) != structure_key(undeclared[1])


def test_tied_parameters_count_once():
    separate = sum(p.numel() for layer in toy_layers() for p in layer.parameters())
    assert count_parameters(toy_layers()) == separate - Middle().table.numel()
