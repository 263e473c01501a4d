"""Costs of layers for tests."""

from dataclasses import MISSING, fields, replace

import torch
from hypothesis import strategies as st

from suite.pipeline.planning.costs import LayerCost, SkipInput, skip_costs

ZERO = LayerCost(**{field.name: 0 for field in fields(LayerCost) if field.default is MISSING})


def layer(weight=1.0, **numbers):
    """F weight, R weight, B 2 weight seconds, no bytes but those given."""
    return replace(ZERO, **{"forward_s": weight, "recompute_s": weight, "backward_s": 2 * weight, **numbers})


def on_meta(make):
    """Returns layers on the meta device."""
    with torch.device("meta"):
        return make()


MEASURED_BYTES = (
    "activation_bytes", "cast_bytes", "forward_peak_bytes", "graph_peak_bytes", "backward_peak_bytes",
    "update_peak_bytes", "deferred_bytes",
)  # fmt: skip
"""What a measurement finds of a layer's bytes, where it is more than the estimate."""


def without_bytes(costs):
    """Returns estimated costs from which a measurement makes those that it finds itself."""
    return [replace(cost, **dict.fromkeys(MEASURED_BYTES, 0)) for cost in costs]


@st.composite
def skipping_costs(draw):
    """Layers with any bytes, whose fronts hold what their skips say."""
    count = draw(st.integers(2, 7))
    size = st.integers(0, 60)
    outputs = [draw(size) for _ in range(count)]  # of the layer before: outputs[0] is the model's input
    popped: list[list[SkipInput]] = [[] for _ in range(count)]
    for target in range(1, count):
        for source in range(target):
            if draw(st.integers(0, 3)) == 0 and target - source > 1:
                same = draw(st.booleans())
                width = outputs[source + 1] if same else draw(size)
                popped[target].append(SkipInput(target - source, width, width, same))
    costs = [
        LayerCost(*[1.0] * 4, draw(size), 0, 0, *[draw(size) for _ in range(5)], skip_inputs=tuple(popped[at]))
        for at in range(count)
    ]
    own = [[skip for skip in skips if skip.own_tensor_at(at)] for at, skips in enumerate(skip_costs(costs))]
    return [
        replace(
            cost,
            boundary_bytes=outputs[at] + sum(skip.bytes for skip in own[at]),
            gradient_bytes=outputs[at] + sum(skip.gradient_bytes for skip in own[at]) if at else 0,
        )
        for at, cost in enumerate(costs)
    ]
