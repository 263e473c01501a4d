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


def one_layer(name, run, refused="", replicas=2, **state):
    """Registers a function of a layer and its inputs. ``state`` are functions that return its attributes: a tensor
    becomes a buffer."""

    def make():
        return [Layer(run, **{attribute: value() for attribute, value in state.items()})]

    PRODUCTIONS[name] = Production(make, refused, replicas)
    return run


def layers(name, make, refused="", replicas=2):
    """Registers a function that returns chunks of layers."""
    PRODUCTIONS[name] = Production(make, refused, replicas)
    return make


def change(name, make, refused=""):
    """Registers a function that changes a linear module."""
    PRODUCTIONS[name] = Production(make, refused, changes=True)
    return make


def layer(refused="", replicas=2, **state):
    """Registers a function with a name by ``one_layer``."""
    return lambda run: one_layer(run.__name__, run, refused, replicas, **state)


def production(refused="", replicas=2, changes=False):
    """Registers a function with a name by ``layers`` or ``change``."""
    return lambda make: (
        change(make.__name__, make, refused) if changes else layers(make.__name__, make, refused, replicas)
    )


def hooked(name, register, hook):
    """Registers a linear module with a hook, which its method ``register`` takes."""

    def make():
        made = nn.Linear(W, W)
        getattr(made, register)(hook)
        return [made]

    layers(name, make)


def hooks_its_weight(name, hook, refused=""):
    """Registers a hook on the weight of a linear module."""
    change(name, lambda linear: linear.weight.requires_grad and linear.weight.register_hook(hook), refused)


def parameter(*shape):
    return nn.Parameter(torch.randn(*shape))
