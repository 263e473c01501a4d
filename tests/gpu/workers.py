"""What a process of the check does on its device: one mini-batch through its stage, as in a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from launch.worker.build import PartitionedModel, make_executor, make_stage_optimizer
from launch.worker.distributed import init_process_group, shared_gpu
from models import embedding
from models.shape import TransformerShape
from suite.pipeline.model.microbatch import ReplicaBatch
from suite.pipeline.model.topology import RankCoord
from suite.pipeline.runtime.p2p import MessageTimeout
from suite.pipeline.runtime.stage import Stage
from suite.pipeline.runtime.weight_grad import weight_grad_sum
from suite.pipeline.runtime.worker_status import WorkerStatus
from suite.pipeline.schedule.config import ScheduleConfig
from suite.settings import OptimizerSettings
from tests.gpu.work import model

Arrays = Mapping[str, NDArray[np.float64]]
"""By layer and name of a parameter."""

SCHEDULE_CONFIG = ScheduleConfig(max_live_graphs=(1,))
"""As in the paper: every micro-batch but the last is recomputed."""

DEADLINE_S = 60.0


@dataclass(frozen=True)
class Start:
    """A mini-batch, and the weights to start from."""

    shape: TransformerShape
    batch: ReplicaBatch
    weights: Arrays


def train(
    rank: int, world: int, rendezvous: str, stages: int, use_gpu: bool, start: Start, dtype: torch.dtype
) -> Arrays:
    """Runs forward, recomputation and backward of a mini-batch; returns the gradients of this worker's stage."""
    device, coord = join(rank, world, rendezvous, stages, use_gpu)
    executor, _ = make_executor(coord, _partitioned(start.shape, stages, dtype), device, "fp32", 0, new_status())
    own = parameters(executor.stage)
    _set_weights(start, own)
    executor.train(start.batch, 0)
    gradients = {key: np.zeros(p.shape) if p.grad is None else p.grad.cpu().numpy() for key, p in own.items()}
    leave()
    return gradients


def train_and_update(
    rank: int, world: int, rendezvous: str, stages: int, use_gpu: bool, start: Start
) -> tuple[tuple[float, ...], bool]:
    """Does a step with its update, on a worker assembled as in a run, in fp32; returns the gradient norm of each layer,
    and whether weights changed."""
    device, coord = join(rank, world, rendezvous, stages, use_gpu)
    partitioned = _partitioned(start.shape, stages, torch.float32)
    executor, groups = make_executor(coord, partitioned, device, "fp32", 0, new_status())
    _set_weights(start, parameters(executor.stage))
    optimizer = make_stage_optimizer(executor, groups, partitioned, OptimizerSettings(warmup_steps=1))
    batch = start.batch
    begin, end = (len(batch) * at // coord.replicas for at in (coord.replica, coord.replica + 1))
    share = ReplicaBatch(batch.inputs[begin:end], batch.targets[begin:end], batch.divisor, begin)
    norms = optimizer.update(executor.train(share, 0), 0).layer_norms
    after = parameters(executor.stage).items()
    changed = any((p.detach().cpu().numpy() != start.weights[key].astype(np.float32)).any() for key, p in after)
    leave()
    return norms, changed


def add_product(rank: int, world: int, rendezvous: str, use_gpu: bool, width: int) -> tuple[Arrays, Arrays]:
    """Adds a product of bf16 factors to an fp32 sum, as a run sums weight gradients; returns the exact sum, and that of
    the device."""
    device = torch.device("cuda", rank) if use_gpu else torch.device("cpu")
    generator = torch.Generator().manual_seed(0)
    total = torch.randn(width, width, generator=generator)
    x, gradient = (torch.randn(width, width, generator=generator).bfloat16() for _ in range(2))
    exact = total.double() + gradient.double().t() @ x.double()
    found = weight_grad_sum(total.to(device), x.to(device), gradient.to(device), torch.float32)
    return {"a sum of products": exact.numpy()}, {"a sum of products": found.cpu().numpy()}


def cells_of(shape: TransformerShape, stages: int) -> list[range]:
    """Returns all layers, or for two stages the encoder's and the decoder's."""
    middle, end = shape.blocks_per_stack + 1, shape.list_length
    return [range(end)] if stages == 1 else [range(middle), range(middle, end)]


def parameters(stage: Stage) -> dict[str, Tensor]:
    """Returns the parameters of a stage by layer and name, as text."""
    return {f"layer {layer}, {name}": parameter for (layer, name), parameter in stage.named_parameters().items()}


def _partitioned(shape: TransformerShape, stages: int, dtype: torch.dtype) -> PartitionedModel:
    return PartitionedModel(*model(shape, dtype), cells_of(shape, stages), SCHEDULE_CONFIG)


def new_status() -> WorkerStatus:
    """Returns the status of a worker that waits for others for a minute at most."""
    return WorkerStatus(MessageTimeout(DEADLINE_S))


def _set_weights(start: Start, own: Mapping[str, Tensor]) -> None:
    for key, parameter in own.items():
        parameter.data.copy_(torch.from_numpy(start.weights[key]))


def join(rank: int, world: int, rendezvous: str, stages: int, use_gpu: bool) -> tuple[torch.device, RankCoord]:
    """Joins the others, and has this process compute as another device does, up to rounding: without TF32, whose
    factors have 10 mantissa bits, and with the CPU's position encodings, because the fp32 sines of two devices differ
    by far more than fp64 products."""
    gpu = shared_gpu(rank, world) if use_gpu else None
    device = init_process_group(rank, world, rendezvous, 1, gpu, DEADLINE_S)
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    original = embedding.sinusoids

    def on_cpu(length: int, width: int, like: Tensor, start: int = 0) -> Tensor:
        return original(length, width, torch.empty(0, dtype=like.dtype), start).to(like.device)

    embedding.sinusoids = on_cpu
    return device, RankCoord(rank, stages, world // stages)


def leave() -> None:
    """Waits for the others: a process that ends early would cut their connections."""
    dist.barrier()
    dist.destroy_process_group()
