"""Freezes parameters of the toy model, in every way that matters to a pipeline of up to four stages."""

from suite.pipeline.model.layers import check_frozen
from tests.suite.pipeline.toy import toy_layers

TABLES = ((0, "table"), (3, "table"))
"""The copies of the tied parameter."""

FREEZES = {
    "nothing": (),
    "the first layer": (0, (3, "table")),
    "layers before one of their class": (0, 1, (3, "table")),
    "a layer behind one that is trained": (1,),
    "the layers of a middle stage": (2, 3, (0, "table")),
    "the last layers": (4, 5),
    "the first half": (0, 1, 2, (3, "table")),
    "the tied parameter": TABLES,
    "weights": ((1, "mix.weight"), (4, "mix.weight"), (5, "out.weight")),
    "biases": ((2, "mix.bias"), (3, "mix.bias"), (5, "out.bias")),
    "all but one bias at the end": (0, 1, 2, 3, 4, (5, "out.weight")),
    "all but one bias at the beginning": (0, (1, "mix.weight"), 2, 3, 4, 5),
}
"""By what is frozen: layers, and parameters by (layer, name). ``idle`` of layer 0 has no gradient but zeros."""


def freeze(layers, frozen):
    """Freezes whole layers, and parameters by (layer, name); returns the layers."""
    for one in frozen:
        index, name = one if isinstance(one, tuple) else (one, None)
        for own, parameter in layers[index].named_parameters():
            if name in (None, own):
                parameter.requires_grad_(False)
    check_frozen(layers)
    return layers


def frozen_toy(name, dtype):
    """Returns the toy model's layers, frozen as ``FREEZES`` says."""
    return freeze(toy_layers(dtype), FREEZES[name])
