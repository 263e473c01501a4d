"""The first mini-batch of a TrainSpec, and what its layers, loss and data stumble over when they are tried on it."""

from __future__ import annotations

from functools import lru_cache

from experiments.custom.batches import SpecBatches
from experiments.custom.layers import find_layer_errors
from experiments.custom.loading import load_spec
from experiments.custom.spec_model import build, update_factors
from suite.errors import SuiteError, first_line
from suite.pipeline.model.layers import Tensors


@lru_cache(maxsize=4)
def first_batch(source: str, seed: int, rows: int) -> tuple[Tensors, Tensors]:
    """Returns inputs and targets. Cached, because a plan needs them many times."""
    return SpecBatches(load_spec(source, seed), rows, seed).whole(0)


@lru_cache(maxsize=16)
def layer_errors(source: str, seed: int, rows: int, least: int) -> tuple[str, ...]:
    """Returns all faults. Cached, because a plan asks for every number of micro-batches that it tries. ``least`` are
    the rows of the smallest micro-batch."""
    spec = load_spec(source, seed)
    try:
        layers, loss = build(spec)
        inputs, targets = first_batch(source, seed, rows)
        SpecBatches(spec, rows, seed).check_prefetch()
        if spec.valid is not None:
            _ = SpecBatches(spec, rows, seed).held_out(1)[0]
        for index, layer in enumerate(layers):
            for name, parameter in layer.named_parameters():
                if parameter.requires_grad:
                    update_factors(spec, f"{index}.{name}", parameter)
        found = find_layer_errors(layers, loss, tuple(t[:least] for t in inputs), tuple(t[:least] for t in targets))
    except SuiteError as error:
        return (str(error),)
    except Exception as error:
        return (f"{source} does not describe a model that can be trained: {type(error).__name__}: {first_line(error)}",)
    return tuple(found)
