"""Counts floating point operations: the one place where the suite does.

    model operations       forward and backward of every micro-batch: what the result needs
    hardware operations    the same, and the forwards that the schedule recomputes: what the devices compute

Counted are matrix products, convolutions and attention, with torch's own formulas (``torch.utils.flop_counter``): a
product of (n, k) and (k, m) is 2nkm. Elementwise operations, norms, softmax, embeddings and the update count nothing,
as is usual (PaLM, appendix B). Attention is counted as the products that it consists of, whichever kernel runs: a fused
kernel's backward computes the scores once more, which is not model work. A causal mask halves nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from suite.pipeline.model.layers import Tensors, as_tuple
from suite.pipeline.planning.partition import cell_ranges
from suite.pipeline.runtime.boundary import Boundary, CutSpec, TensorSpec
from suite.pipeline.runtime.shape_inference import ShapeInference, fake_copy, run_distinct
from suite.pipeline.schedule.action import of_kind
from suite.pipeline.schedule.config import ScheduleConfig

_CPU = torch.device("cpu")


_FUSED_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_FUSED_ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def op_flops(func: Any, args: Any, kwargs: Any, out: Any) -> float:
    """Returns the operations of one operator; 0 for all but matrix products, convolutions and attention."""
    packet = func._overloadpacket
    if packet is _FUSED_ATTENTION:
        return float(sdpa_flop_count(*(tensor.shape for tensor in args[:3])))
    if packet is _FUSED_ATTENTION_BACKWARD:
        return float(sdpa_backward_flop_count(*(tensor.shape for tensor in args[:4])))
    count = flop_registry.get(packet)
    return 0.0 if count is None else float(count(*args, **kwargs, out_val=out))


@dataclass(frozen=True)
class LayerFlops:
    """Operations of one layer and one micro-batch; the last layer's include the loss."""

    forward: float
    backward: float


@dataclass(frozen=True)
class StepFlops:
    """Operations of a step for each unit, such as a token, of its mini-batch."""

    model_per_unit: float
    hardware_per_unit: float


def count_flops(layers: Sequence[nn.Module], loss: nn.Module, inputs: Tensors, targets: Tensors) -> list[LayerFlops]:
    """Counts the operations of meta-device layers on one micro-batch; equal layers are run once, on fake tensors."""
    cuts = ShapeInference(layers).infer_all(CutSpec.of(inputs))

    def count(layer: nn.Module, boundary: Boundary, is_last: bool) -> LayerFlops:
        return _count(layer, boundary, (loss, targets) if is_last else None)

    return run_distinct(layers, cuts, count)


def step_flops(
    counts: Sequence[LayerFlops],
    layers_per_cell: Sequence[int],
    schedule_config: ScheduleConfig,
    stages: int,
    micro_batches: int,
    units: float,
) -> StepFlops:
    """Returns the operations of a step per unit, if a micro-batch of ``units`` units has these ``counts``.

    ``layers_per_cell`` are the cells in the order of the model.
    """
    model = sum(count.forward + count.backward for count in counts)
    forwards = [sum(counts[layer].forward for layer in cell) for cell in cell_ranges(layers_per_cell, len(counts))]
    recomputed, placement = 0.0, schedule_config.placement(stages)
    for stage, actions in enumerate(schedule_config.actions(stages, micro_batches)):
        recomputed += sum(forwards[placement.cell_of(v, stage)] for v, _ in of_kind(actions, "R"))
    return StepFlops(model / units, (model + recomputed / micro_batches) / units)


def _count(layer: nn.Module, boundary: Boundary, loss_and_targets: tuple[nn.Module, Tensors] | None) -> LayerFlops:
    """Runs one layer forward and backward. The last one's loss gets its whole outputs, not chunks of them, because the
    recomputation of chunks is not model work."""
    with fake_copy(layer) as own, torch.enable_grad():
        tensors = tuple(spec.empty(_CPU).requires_grad_(spec.needs_gradient) for spec in boundary)
        with _FlopCounter() as forward:
            outputs = as_tuple(own(*tensors))
            if loss_and_targets is not None:
                loss, targets = loss_and_targets
                outputs = (loss(*outputs, *(TensorSpec.of(target).empty(_CPU) for target in targets))[0],)
        starts = list({id(output): output for output in outputs if output.requires_grad}.values())
        with _FlopCounter() as backward:
            if starts:
                torch.autograd.backward(starts, [torch.empty_like(output) for output in starts])
    return LayerFlops(forward.total, backward.total)


class _FlopCounter(TorchDispatchMode):
    """A mode that adds up the model operations of all operators in ``total``."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Tensor | Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func._overloadpacket is _FUSED_ATTENTION_BACKWARD:
            # no sdpa_kernel(MATH) instead: it is a switch of the whole process, and a sweep counts in several threads
            self.total += 2 * sdpa_flop_count(*(tensor.shape for tensor in args[1:4]))
        else:
            self.total += op_flops(func, args, kwargs, out)
        return out
