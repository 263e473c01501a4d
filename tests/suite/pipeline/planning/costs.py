"""Costs of layers for tests."""

from dataclasses import MISSING, fields, replace

from suite.pipeline.planning.costs import LayerCost

ZERO = LayerCost(**{field.name: 0 for field in fields(LayerCost) if field.default is MISSING})


def layer(weight=1.0, **numbers):
    """F weight, R weight, B 2 weight seconds, no bytes but those given."""
    return replace(ZERO, **{"forward_s": weight, "recompute_s": weight, "backward_s": 2 * weight, **numbers})


MEASURED_BYTES = (
    "activation_bytes", "cast_bytes", "forward_peak_bytes", "graph_peak_bytes", "backward_peak_bytes",
    "update_peak_bytes", "deferred_bytes",
)  # fmt: skip
"""What a measurement finds of a layer's bytes, where it is more than the estimate."""


def without_bytes(costs):
    """Returns estimated costs from which a measurement makes those that it finds itself."""
    return [replace(cost, **dict.fromkeys(MEASURED_BYTES, 0)) for cost in costs]
