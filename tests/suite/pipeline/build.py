"""Stands up the real parts of a pipeline in the processes of a test."""

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn

from launch.worker.build import PartitionedModel, make_executor, make_links, make_stage_optimizer
from suite.pipeline.model.layers import materialize, ties_of
from suite.pipeline.model.microbatch import ReplicaBatch
from suite.pipeline.model.rng import initial_seed, layer_seed, set_seed
from suite.pipeline.model.ties import TiedParameters, find_ties
from suite.pipeline.model.topology import RankCoord, make_groups
from suite.pipeline.planning.partition import cell_ranges, partition
from suite.pipeline.runtime.executor import CellLinks, Executor
from suite.pipeline.runtime.p2p import MessageTimeout
from suite.pipeline.runtime.skip import SkipLayout, call, communicating_pairs, find_skips
from suite.pipeline.runtime.stage import Stage
from suite.pipeline.schedule.config import ScheduleConfig
from suite.pipeline.schedule.remat import MAX_LIVE_GRAPHS
from suite.settings import OptimizerSettings
from suite.training.stage_optimizer import StageOptimizer
from tests.micro_batches import split

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Engine:
    """What ``launch.worker.build`` makes of one worker."""

    executor: Executor
    optimizer: StageOptimizer


def assemble(coord: RankCoord, model: PartitionedModel, settings: OptimizerSettings, device=CPU, seed=7) -> Engine:
    """Returns a worker's engine, as a run has it."""
    executor, groups = make_executor(coord, model, device, settings.precision, seed)
    return Engine(executor, make_stage_optimizer(executor, groups, model, settings))


def join(rank: int, world: int, rendezvous: str, threads: int = 1) -> None:
    torch.set_num_threads(threads)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world)


def parameters_of(layer: nn.Module) -> float:
    """A weight for the partition, any will do."""
    return float(sum(p.numel() for p in layer.parameters()) or 1)


def build(
    coord: RankCoord,
    layers: list[nn.Module],
    loss: nn.Module,
    schedule_config,
    seed: int = 7,
    timeout_s: float = 60.0,
    cells=None,
    precision: str = "fp32",
):
    """Returns (executor, ties, parameters, groups) of this worker, weights equalised; a remat stands for fill-drain."""
    schedule_config = (
        schedule_config
        if isinstance(schedule_config, ScheduleConfig)
        else ScheduleConfig("fill_drain", (MAX_LIVE_GRAPHS[schedule_config],))
    )
    count = coord.stages * schedule_config.virtual_stages
    coord = replace(coord, cell_to_stage=schedule_config.cell_to_stage(coord.stages))
    cells = cells or cell_ranges(partition([parameters_of(layer) for layer in layers], count), len(layers))
    groups = make_groups(coord, timeout_s, communicating_pairs(find_skips(layers), cells, coord.placement))
    mine, loss = coord.placement.on_stage(coord.stage, cells), loss if coord.has_loss else None
    stage = Stage(layers, mine, loss, CPU, precision, seed, schedule_config.defers_weight_grads)
    model = PartitionedModel(layers, loss, cells, schedule_config)
    ways = make_links(coord, model, groups, CPU, MessageTimeout(timeout_s))
    named = stage.named_parameters()
    ties = TiedParameters(find_ties(layers, cells, coord.placement), coord, named, timeout_s)
    ties.broadcast_first_copy()
    return Executor(coord, stage, ways, schedule_config), ties, named, groups


def alone(layers: list[nn.Module], loss: nn.Module, config: ScheduleConfig, precision: str = "fp32") -> Executor:
    """Returns an executor of all layers, in this process."""
    cells = [range(len(layers))]
    stage = Stage(layers, cells, loss, CPU, precision, 7, config.defers_weight_grads)
    return Executor(RankCoord(0, 1, 1), stage, [CellLinks(SkipLayout(find_skips(layers), cells, 0), None)], config)


def mini_batch(tensors, labels, micro_batches, replica=0, replicas=1, total=None) -> ReplicaBatch:
    """Cuts a mini-batch into R*M micro-batches, or ``total``, and returns one replica's: M, or what is left of them."""
    total = total or micro_batches * replicas
    inputs, targets = split([tensors], total), split([labels], total)
    mine = slice(replica * micro_batches, (replica + 1) * micro_batches)
    return ReplicaBatch(inputs[mine], targets[mine], float((labels != 0).sum()), replica * micro_batches)


def whole(layers: list[nn.Module], seed: int = 7) -> list[nn.Module]:
    """Returns the model's layers as they begin, tied parameters truly shared."""
    made = [materialize(layer, initial_seed(seed, index), CPU) for index, layer in enumerate(layers)]
    copies: dict[str, nn.Parameter] = {}
    for layer in made:
        for name, tie in ties_of(layer).items():
            module, _, attribute = name.rpartition(".")
            holder = layer.get_submodule(module)
            if tie in copies:
                setattr(holder, attribute, copies[tie])
            copies.setdefault(tie, getattr(holder, attribute))
    return made


def run(made: list[nn.Module], inputs, step: int, micro_batch: int, seed: int = 7, bf16: bool = False):
    """Passes one micro-batch through all layers; with ``bf16`` their outputs become bf16."""
    tensors, stash = inputs, {}
    for index, layer in enumerate(made):
        set_seed(layer_seed(seed, step, micro_batch, index), CPU)
        tensors = call(layer, tensors, stash, bf16)
    return tensors


def unpartitioned(layers: list[nn.Module], loss: nn.Module, batch: ReplicaBatch, step: int, seed: int = 7):
    """The same model as one module with truly shared parameters, differentiated as a whole by autograd.

    Returns (objective, {(layer, name): gradient}) for first copies.
    """
    made = whole(layers, seed)
    total = torch.zeros((), dtype=next(made[-1].parameters()).dtype)
    for i, (inputs, targets) in enumerate(zip(batch.inputs, batch.targets, strict=True)):
        total = total + loss(*run(made, inputs, step, batch.offset + i, seed), *targets)[0]
    (total / batch.divisor).backward()
    gradients = {
        (index, name): torch.zeros_like(p) if p.grad is None else p.grad
        for index, layer in enumerate(made)
        for name, p in layer.named_parameters()
    }
    return total.item(), gradients


def differences(named, expected):
    """Returns by key how much gradients differ from those expected, as a share of the largest where that exceeds 1. A
    parameter without a gradient has one of zeros."""
    found = {}
    for key, parameter in named.items():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        largest = max(1.0, float(expected[key].abs().max()))
        found[key] = float((gradient - expected[key]).abs().max()) / largest
    return found
