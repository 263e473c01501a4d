"""A grammar of models out of odd things that people put in modules: each production makes one of them.

``tensors``, ``modules``, ``autograd`` and ``several_layers`` have what trains, ``refused`` and ``refused_parts`` what
does not; ``draw`` makes a TrainSpec of some.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

W = 6


@dataclass(frozen=True)
class Production:
    make: Callable
    """Returns chunks of layers, in order: a layer, or a tuple of layers that must stay together. One that only changes
    another layer is called with a linear module of the model instead, and returns nothing."""
    refused: str = ""
    """What a refusal of a model with it alone says; empty if that trains."""
    replicas: int = 2
    """The most: 1 where each forward changes buffers, of which each replica has its own."""
    changes: bool = False
    """Whether it only changes another layer."""

    def expects(self, outcome):
        """Whether this is what becomes of a model with it alone (``grammar_run.outcomes``)."""
        return self.refused in outcome and outcome.startswith("refused: ") if self.refused else outcome == "trained"


PRODUCTIONS: dict[str, Production] = {}


class Layer(nn.Module):
    """A linear module, and a function of the layer and its inputs."""

    def __init__(self, run, **state):
        super().__init__()
        self.inner, self.run = nn.Linear(W, W), run
        for name, value in state.items():
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, *inputs):
        return self.run(self, *inputs)


def layer(refused="", replicas=2, **state):
    """Registers a function of a layer and its inputs. ``state`` are functions that return its attributes: a tensor
    becomes a buffer."""

    def register(run):
        def make():
            return [Layer(run, **{name: value() for name, value in state.items()})]

        PRODUCTIONS[run.__name__] = Production(make, refused, replicas)
        return run

    return register


def production(refused="", replicas=2, changes=False):
    """Registers a function that returns chunks of layers, or changes a linear module."""

    def register(make):
        PRODUCTIONS[make.__name__] = Production(make, refused, replicas, changes)
        return make

    return register


def parameter(*shape):
    return nn.Parameter(torch.randn(*shape))
