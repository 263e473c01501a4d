"""One step with its update on every GPU that torch sees, built as a run builds its workers: DeepSpeed, ties, replicas.

    4 GPUs    K = 2, R = 2    stage 0 | stage 1    each worker's weights stay on its own GPU, and move;
                              stage 0 | stage 1    each layer has the gradient norm that the CPU computes

With an odd number of GPUs K is 1. On the CPU four processes do the same on gloo.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from launch.gpu_check import gradients
from launch.gpu_check.two_stages import DEADLINE_S, run_spawned
from launch.gpu_check.work import SCHEDULE_CONFIG, Sizes, SkippedError
from launch.worker.distributed import init_process_group
from suite.device import is_host, module_of
from suite.pipeline.model.microbatch import MiniBatch
from suite.pipeline.model.ties import TiedParameters, find_ties
from suite.pipeline.model.topology import RankCoord
from suite.pipeline.runtime.stage import Stage
from suite.settings import OptimizerSettings

Weights = Mapping[tuple[int, str], Tensor]
"""By layer and name."""

CPU_WORKERS = 4


def measure_update(sizes: Sizes, device: torch.device) -> dict[str, Any]:
    """Trains one mini-batch with its update, in fp32. Raises SkippedError without DeepSpeed."""
    if importlib.util.find_spec("deepspeed") is None:
        raise SkippedError("a run's update is DeepSpeed's, and it is not installed; make help installs it")
    world = CPU_WORKERS if is_host(device) else module_of(device).device_count()
    stages = 1 if world % 2 else 2
    batch, _ = gradients.choose_batch(sizes)
    weights, expected = _on_cpu(sizes, batch)
    found = run_spawned(_run_worker, world, stages, device.type, sizes, batch, weights)
    tolerance = gradients.tolerance(sizes.gradients, torch.float32, batch)
    errors = [_deviation(norms, expected) for norms, _ in found]
    faults = [f"worker {rank} kept its weights" for rank, (_, changed) in enumerate(found) if not changed]
    faults += [
        f"a layer's gradient norm of worker {rank} differs from the CPU's by {error:.2g}, with {tolerance:.2g} allowed"
        for rank, error in enumerate(errors)
        if not error <= tolerance  # true for what is not a number
    ]
    return {
        "stages": stages,
        "replicas": world // stages,
        "measured": {"error": max(errors)},
        "computed": {"tolerance": tolerance},
        "faults": faults,
    }


def _on_cpu(sizes: Sizes, batch: MiniBatch) -> tuple[Weights, list[float]]:
    """Returns the weights to start from, and the gradient norm of each layer with them."""
    made, _ = gradients.model(sizes.gradients, torch.float32)
    stages = gradients.stages_of(sizes.gradients, torch.float32, gradients.CPU)
    parameters = {key: parameter for stage in stages for key, parameter in stage.named_parameters().items()}
    ties = TiedParameters(find_ties(made, [range(len(made))], 1), RankCoord(0, 1, 1), parameters, 0.0)
    ties.broadcast_owner()
    with gradients.exact():
        gradients.run_batch(sizes.gradients, stages, batch)
    ties.sum_gradients()
    squares = [0.0] * len(made)
    for (layer, name), parameter in parameters.items():
        if ties.owned(layer, name) and parameter.grad is not None:
            squares[layer] += float(parameter.grad.double().square().sum())
    return {key: parameter.detach() for key, parameter in parameters.items()}, [math.sqrt(one) for one in squares]


def _deviation(norms: Sequence[float], expected: Sequence[float]) -> float:
    """Returns the largest relative deviation; not a number if a norm is none."""
    return float((torch.tensor(norms) / torch.tensor(expected) - 1).abs().max())


def _run_worker(
    rank: int, folder: str, world: int, stages: int, kind: str, sizes: Sizes, batch: MiniBatch, weights: Weights
) -> None:
    from launch.worker.engine import PartitionedModel, assemble  # imports packages that a bare checkout lacks

    gpu = rank if kind == "cuda" else None
    device = init_process_group(rank, world, f"file://{folder}/rendezvous", 1, gpu, DEADLINE_S)
    coord = RankCoord(rank, stages, world // stages)
    made, loss = gradients.model(sizes.gradients, torch.float32)
    cells = gradients.cells_of(sizes.gradients) if stages == 2 else [range(len(made))]
    model = PartitionedModel(made, loss, cells, SCHEDULE_CONFIG)

    def set_weights(stage: Stage) -> None:
        for key, parameter in stage.named_parameters().items():
            parameter.data.copy_(weights[key])

    begin, end = (len(batch) * at // coord.replicas for at in (coord.replica, coord.replica + 1))
    share = MiniBatch(batch.inputs[begin:end], batch.targets[begin:end], batch.weight, begin)
    with gradients.exact():
        engine = assemble(coord, model, device, OptimizerSettings(warmup_steps=1), 0, set_weights)
        result = engine.optimizer.update(engine.executor.train(share, 0), 0)
    parameters = engine.executor.stage.named_parameters()
    changed = any(not torch.equal(parameter.cpu(), weights[key]) for key, parameter in parameters.items())
    torch.save((result.layer_norms, changed), Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
