"""Stands up the real parts of a pipeline in the processes of a test."""

import torch
import torch.distributed as dist
from torch import nn

from suite.pipeline.layers import as_tuple, cost_of, materialise, ties_of
from suite.pipeline.microbatch import MiniBatch, split
from suite.pipeline.partition import cell_ranges, partition
from suite.pipeline.rng import initial_seed, layer_seed, set_seed
from suite.pipeline.stage import Stage
from suite.pipeline.step import Executor
from suite.pipeline.ties import Ties, find_ties
from suite.pipeline.topology import Place, make_groups
from suite.pipeline.transport import Deadline, Transport

CPU = torch.device("cpu")


def join(rank: int, world: int, rendezvous: str, threads: int = 1) -> None:
    torch.set_num_threads(threads)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world)


def build(place: Place, layers: list[nn.Module], loss: nn.Module, remat: str, seed: int = 7, deadline: float = 60.0):
    """Returns (executor, ties) of this worker, weights equalised."""
    groups = make_groups(place, deadline)
    cells = cell_ranges(partition([cost_of(layer) for layer in layers], place.stages), len(layers))
    stage = Stage(layers, cells[place.stage], loss if place.last else None, CPU, "fp32", seed)
    transport = Transport(place, groups, CPU, Deadline(deadline)) if place.stages > 1 else None
    named = {
        (index, name): parameter
        for index, layer in zip(stage.indices, stage.layers, strict=True)
        for name, parameter in layer.named_parameters()
    }
    ties = Ties(find_ties(layers, cells), place, named, deadline)
    ties.equalise()
    return Executor(place, stage, transport, remat), ties, named, groups


def mini_batch(tensors, labels, micro_batches, replica=0, replicas=1, total=None) -> MiniBatch:
    """Cuts a mini-batch into R*M micro-batches, or ``total``, and returns one replica's: M, or what is left of them."""
    total = total or micro_batches * replicas
    inputs, targets = split([tensors], total), split([labels], total)
    mine = slice(replica * micro_batches, (replica + 1) * micro_batches)
    return MiniBatch(inputs[mine], targets[mine], float((labels != 0).sum()), replica * micro_batches)


def unpartitioned(layers: list[nn.Module], loss: nn.Module, batch: MiniBatch, step: int, seed: int = 7):
    """The same model as one module with truly shared parameters, differentiated as a whole by autograd.

    Returns (objective, {(layer, name): gradient}) for owned parameters.
    """
    made = [materialise(layer, initial_seed(seed, index), CPU) for index, layer in enumerate(layers)]
    owners: dict[str, nn.Parameter] = {}
    for layer in made:
        for name, tie in ties_of(layer).items():
            module, _, attribute = name.rpartition(".")
            holder = layer.get_submodule(module)
            if tie in owners:
                setattr(holder, attribute, owners[tie])
            owners.setdefault(tie, getattr(holder, attribute))
    total = torch.zeros((), dtype=next(made[-1].parameters()).dtype)
    for i, (inputs, targets) in enumerate(zip(batch.inputs, batch.targets, strict=True)):
        tensors = inputs
        for index, layer in enumerate(made):
            set_seed(layer_seed(seed, step, batch.offset + i, index), CPU)
            tensors = as_tuple(layer(*tensors))
        total = total + loss(*tensors, *targets)[0]
    (total / batch.weight).backward()
    gradients = {
        (index, name): torch.zeros_like(p) if p.grad is None else p.grad
        for index, layer in enumerate(made)
        for name, p in layer.named_parameters()
    }
    return total.item(), gradients
