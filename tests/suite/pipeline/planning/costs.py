"""Costs of layers for tests."""

from dataclasses import MISSING, fields, replace

from suite.pipeline.planning.costs import LayerCost

ZERO = LayerCost(**{field.name: 0 for field in fields(LayerCost) if field.default is MISSING})


def layer(weight=1.0, **numbers):
    """F weight, R weight, B 2 weight seconds, no bytes but those given."""
    return replace(ZERO, **{"forward_s": weight, "recompute_s": weight, "backward_s": 2 * weight, **numbers})
