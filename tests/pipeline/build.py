"""Stands up the real parts of a pipeline in the processes of a test."""

import torch
import torch.distributed as dist
from torch import nn

from launch.engine import make_ways
from suite.pipeline.layers import materialise, ties_of
from suite.pipeline.microbatch import MiniBatch, split
from suite.pipeline.partition import cell_ranges, partition
from suite.pipeline.rebuild import GRAPHS
from suite.pipeline.recipe import Recipe
from suite.pipeline.rng import initial_seed, layer_seed, set_seed
from suite.pipeline.skip import call, communicating_pairs, find_skips
from suite.pipeline.stage import Stage
from suite.pipeline.step import Executor
from suite.pipeline.ties import Ties, find_ties
from suite.pipeline.topology import Place, make_groups
from suite.pipeline.transport import Deadline

CPU = torch.device("cpu")


def join(rank: int, world: int, rendezvous: str, threads: int = 1) -> None:
    torch.set_num_threads(threads)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world)


def parameters_of(layer: nn.Module) -> float:
    """A weight for the partition, any will do."""
    return float(sum(p.numel() for p in layer.parameters()) or 1)


def build(
    place: Place, layers: list[nn.Module], loss: nn.Module, recipe, seed: int = 7, deadline: float = 60.0, cells=None
):  # fmt: skip
    """Returns (executor, ties, parameters, groups) of this worker, weights equalised; a remat stands for fill-drain."""
    recipe = recipe if isinstance(recipe, Recipe) else Recipe("fill_drain", (GRAPHS[recipe],))
    count = place.stages * recipe.turns
    cells = cells or cell_ranges(partition([parameters_of(layer) for layer in layers], count), len(layers))
    groups = make_groups(place, deadline, communicating_pairs(find_skips(layers), cells, place.stages))
    mine, loss = cells[place.stage :: place.stages], loss if place.last else None
    stage = Stage(layers, mine, loss, CPU, "fp32", seed, recipe.splits)
    ways = make_ways(place, layers, cells, groups, CPU, Deadline(deadline))
    named = {
        (index, name): parameter
        for index, layer in zip(stage.indices, stage.layers, strict=True)
        for name, parameter in layer.named_parameters()
    }
    ties = Ties(find_ties(layers, cells, place.stages), place, named, deadline)
    ties.equalise()
    return Executor(place, stage, ways, recipe), ties, named, groups


def mini_batch(tensors, labels, micro_batches, replica=0, replicas=1, total=None) -> MiniBatch:
    """Cuts a mini-batch into R*M micro-batches, or ``total``, and returns one replica's: M, or what is left of them."""
    total = total or micro_batches * replicas
    inputs, targets = split([tensors], total), split([labels], total)
    mine = slice(replica * micro_batches, (replica + 1) * micro_batches)
    return MiniBatch(inputs[mine], targets[mine], float((labels != 0).sum()), replica * micro_batches)


def whole(layers: list[nn.Module], seed: int = 7) -> list[nn.Module]:
    """Returns the model's layers as they begin, tied parameters truly shared."""
    made = [materialise(layer, initial_seed(seed, index), CPU) for index, layer in enumerate(layers)]
    owners: dict[str, nn.Parameter] = {}
    for layer in made:
        for name, tie in ties_of(layer).items():
            module, _, attribute = name.rpartition(".")
            holder = layer.get_submodule(module)
            if tie in owners:
                setattr(holder, attribute, owners[tie])
            owners.setdefault(tie, getattr(holder, attribute))
    return made


def run(made: list[nn.Module], inputs, step: int, micro_batch: int, seed: int = 7):
    """Passes one micro-batch through all layers."""
    tensors, stash = inputs, {}
    for index, layer in enumerate(made):
        set_seed(layer_seed(seed, step, micro_batch, index), CPU)
        tensors = call(layer, tensors, stash)
    return tensors


def unpartitioned(layers: list[nn.Module], loss: nn.Module, batch: MiniBatch, step: int, seed: int = 7):
    """The same model as one module with truly shared parameters, differentiated as a whole by autograd.

    Returns (objective, {(layer, name): gradient}) for owned parameters.
    """
    made = whole(layers, seed)
    total = torch.zeros((), dtype=next(made[-1].parameters()).dtype)
    for i, (inputs, targets) in enumerate(zip(batch.inputs, batch.targets, strict=True)):
        total = total + loss(*run(made, inputs, step, batch.offset + i, seed), *targets)[0]
    (total / batch.weight).backward()
    gradients = {
        (index, name): torch.zeros_like(p) if p.grad is None else p.grad
        for index, layer in enumerate(made)
        for name, p in layer.named_parameters()
    }
    return total.item(), gradients
