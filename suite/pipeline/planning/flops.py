"""Floating point operations of operators and of steps: the one place where the suite counts them.

    model operations       forward and backward of every micro-batch: what the result needs
    hardware operations    the same, and the forwards that the schedule recomputes: what the devices compute

Matrix products, convolutions and attention count, by torch's own formulas (``torch.utils.flop_counter``): a product of
(n, k) and (k, m) is 2nkm. Elementwise operations, norms, softmax, embeddings and the update count nothing, as is usual
(PaLM, appendix B). A causal mask halves nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from suite.pipeline.planning.costs import LayerCost
from suite.pipeline.planning.partition import cell_ranges
from suite.pipeline.schedule.action import of_kind
from suite.pipeline.schedule.config import ScheduleConfig

_FUSED_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_FUSED_ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def op_flops(func: Any, args: Any, kwargs: Any, out: Any) -> tuple[int, int]:
    """Returns the model and the hardware operations of one operator; 0 for all but matrix products, convolutions and
    attention. They differ in the backward of fused attention: the kernel computes the scores once more."""
    packet = func._overloadpacket
    if packet is _FUSED_ATTENTION_BACKWARD:
        shapes = [tensor.shape for tensor in args[:4]]
        return 2 * sdpa_flop_count(*shapes[1:]), sdpa_backward_flop_count(*shapes)
    if packet is _FUSED_ATTENTION:
        flops = sdpa_flop_count(*(tensor.shape for tensor in args[:3]))
    else:
        count = flop_registry.get(packet)
        flops = 0 if count is None else count(*args, **kwargs, out_val=out)
    return flops, flops


@dataclass(frozen=True)
class StepFlops:
    """Operations of a step for each unit, such as a token, of its mini-batch."""

    model_per_unit: float
    hardware_per_unit: float


def step_flops(
    costs: Sequence[LayerCost],
    layers_per_cell: Sequence[int],
    schedule_config: ScheduleConfig,
    stages: int,
    micro_batches: int,
    units: float,
) -> StepFlops:
    """Returns the operations of a step per unit, if a micro-batch of ``units`` units has these ``costs``.

    ``layers_per_cell`` are the cells in the order of the model.
    """
    model = sum(cost.forward_flops + cost.backward_flops for cost in costs)
    forwards = [sum(costs[layer].forward_flops for layer in cell) for cell in cell_ranges(layers_per_cell, len(costs))]
    recomputed, placement = 0, schedule_config.placement(stages)
    for stage, actions in enumerate(schedule_config.actions(stages, micro_batches)):
        recomputed += sum(forwards[placement.cell_of(v, stage)] for v, _ in of_kind(actions, "R"))
    return StepFlops(model / units, (model + recomputed / micro_batches) / units)
