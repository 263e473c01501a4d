"""Bytes a stage needs, estimated: the layers run once on the meta device, and what autograd would keep is added up.

    stage = parameters * bytes each  +  (M + 8) * boundary  +  activations of one micro-batch  +  3 * the largest

The boundary is what a stage is given for a micro-batch and keeps until its rebuild; eight more are on their way in or
out (``suite.pipeline.transport``: WINDOW received ahead each way, OUTSTANDING sent); the activations are those of one
rebuilt cell (section 2.3 of the paper: N + L/K * N/M); the last term is room for the gradients and fp32 copies of the
largest tensor, for the last stage the logits. Fragmentation and the library's own memory are not in it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from experiments.experiment import Experiment
from experiments.kept import LayerBytes, measured_layers
from suite.pipeline.layers import cost_of
from suite.pipeline.partition import cell_ranges, partition
from suite.pipeline.transport import OUTSTANDING, WINDOW
from suite.settings import OptimizerSettings


def bytes_needed(experiment: Experiment) -> list[int]:
    """Returns the bytes of each of the K stages, cut as the run would cut them."""
    layers, _ = experiment.build()
    return stage_bytes(experiment, layer_bytes(experiment), [len(cell) for cell in experiment.cells(layers)])


def smallest_stages(experiment: Experiment, limit: int, most: int) -> int | None:
    """Returns the smallest K, ``most`` at most, whose every stage fits ``limit`` bytes; None where there is none."""
    layers, _ = experiment.build()
    costs, sizes = [cost_of(layer) for layer in layers], layer_bytes(experiment)
    for stages in range(1, min(most, len(costs)) + 1):
        if max(stage_bytes(experiment, sizes, partition(costs, stages))) <= limit:
            return stages
    return None


def stage_bytes(experiment: Experiment, sizes: Sequence[LayerBytes], cells: Sequence[int]) -> list[int]:
    """Returns the sum at the head of this file for each cell."""
    each = bytes_per_parameter(experiment.optimizer, experiment.pipeline.replicas)
    micro_batches, rebuilt = experiment.pipeline.micro_batches, experiment.pipeline.remat != "never"
    result = []
    for cell in cell_ranges(cells, len(sizes)):
        inside = [sizes[index] for index in cell]
        kept = sum(size.activations for size in inside)
        kept = micro_batches * inside[0].boundary + kept if rebuilt else micro_batches * kept
        kept += (2 * WINDOW + OUTSTANDING) * max(size.boundary for size in inside)
        weights = each * sum(size.parameters for size in inside)
        result.append(math.ceil(weights + kept + 3 * max(size.largest for size in inside)))
    return result


def bytes_per_parameter(optimizer: OptimizerSettings, replicas: int) -> float:
    """Weight 4 and gradient 4, always fp32; with bf16 products another 2, the copy that autocast makes of a weight.

    AdamW adds two moments of 4. With replicas (ZeRO-1) each holds its share of them, and of a flat copy of the weights
    and of the reduced gradients. Adafactor keeps a number a row and column, not counted, and is not shared out.
    """
    cast = 2.0 if optimizer.precision == "bf16" else 0.0
    if optimizer.name == "adafactor":
        return 8.0 + cast
    return 8.0 + cast + (8.0 if replicas == 1 else 16.0 / replicas)


def layer_bytes(experiment: Experiment) -> list[LayerBytes]:
    """Runs one micro-batch of longest sentences through all layers and the loss, on the meta device, in fp32.

    Under bf16 products a part of the activations is half as large: boundaries, norms and sums are not, so fp32 is the
    bound that a plan may trust.
    """
    layers, loss = experiment.build()
    train, pipeline, time = experiment.train, experiment.pipeline, experiment.text.max_tokens
    rows = math.ceil(train.batch_tokens / (pipeline.replicas * pipeline.micro_batches * time))
    ids = torch.empty(rows, time, dtype=torch.int64, device="meta")
    return measured_layers(layers, (ids, ids), lambda *outputs: loss(*outputs, ids))
