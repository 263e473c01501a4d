"""Trains an experiment in one process by plain autograd, as a script without a pipeline would.

    layer after layer -> loss / the mini-batch's divisor -> backward, micro-batch after micro-batch -> clip -> update

Seeds, the order of sums over tied copies, and the norm that clips are as documented (docs/architecture.md).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from experiments.base.cluster import Cluster
from experiments.base.experiment import Experiment
from launch.backends.processes import run_processes
from launch.runs.store import CACHE, RunFolder
from launch.worker.devices import this_machine
from launch.worker.distributed import init_process_group
from models.chunked_loss import CPU_LOGITS_BYTES, set_logits_bytes
from suite.errors import PlacementError, SettingError
from suite.paths import write_atomically
from suite.pipeline.model.layers import as_tuple, count_parameters, distinct_parameters, loss_of, materialize, ties_of
from suite.pipeline.model.microbatch import ReplicaBatch
from suite.pipeline.model.rng import initial_seed, layer_seed, set_seed
from suite.pipeline.model.topology import RankCoord
from suite.pipeline.planning.devices import GIB
from suite.pipeline.planning.memory import bytes_per_parameter
from suite.pipeline.runtime.layer_hooks import Place, watch_tensors
from suite.settings import AUTO, PipelineSettings
from suite.training.fingerprints import FingerprintFile
from suite.training.update_rule import Key, learning_rate, make_optimizer, param_groups

REMEDY = "use a machine with more memory, or compare a model with fewer layers"


def train_plainly(chosen: Experiment, run: RunFolder, machine: Cluster) -> None:
    """Trains all steps of a prepared experiment on a GPU of this machine, or its CPU if it has none, with all
    micro-batches of its replicas, and writes fingerprints to the run's folder. Raises SettingError for a run that
    starts from another one's weights, or leaves the number of micro-batches to the plan."""
    if chosen.train.init_from is not None:
        raise SettingError("plain PyTorch starts from a seed; leave train.init_from out")
    total = chosen.pipeline.micro_batches * chosen.pipeline.replicas
    if chosen.pipeline.micro_batches == AUTO:
        raise SettingError("plain PyTorch has no plan; give pipeline.micro_batches as a number, for both")
    chosen = chosen.with_pipeline(PipelineSettings(stages=1, replicas=1, micro_batches=total))
    write_atomically(run.experiment, chosen.to_toml())
    run_processes(_train, 1, chosen, chosen.data_folder(CACHE).resolve(), run.fingerprints, machine)


def check_fits(chosen: Experiment) -> None:
    """Raises PlacementError when the whole model is too large for one process on this machine: for a GPU, or for all
    its memory if it has none."""
    machine, layers = this_machine(), chosen.build()[0]
    available = machine.bytes_per_device * (1 if machine.kind == "gpu" else machine.devices)
    words = sum(parameter.nbytes for *_, parameter in distinct_parameters(layers)) / 4
    needed = words * bytes_per_parameter(chosen.optimizer, replicas=1)
    if needed > available:
        raise PlacementError(
            f"plain PyTorch trains in one process, where {count_parameters(layers):,} parameters with gradients and "
            f"optimizer take {needed / GIB:.1f} GiB and there are {available / GIB:.1f}; {REMEDY}"
        )


def _train(
    rank: int, world: int, rendezvous: str, chosen: Experiment, data: Path, folder: Path, machine: Cluster
) -> None:
    device = init_process_group(rank, world, rendezvous, 1, 0 if machine.kind == "gpu" else None)
    layers, loss = build_layers(chosen, device, machine.logits_bytes)
    named, copies = _trainable(layers), _copies(layers)
    parameters = _distinct(named)
    firsts = {key: keys[0] for keys in copies.values() for key in keys}  # copies have the factors of the first one
    names = {key: "{}.{}".format(*firsts.get(key, key)) for key in parameters}
    factors = {key: chosen.update_factors(names[key], parameter) for key, parameter in parameters.items()}
    optimizer = make_optimizer(param_groups(parameters, factors, chosen.optimizer), chosen.optimizer)
    source = chosen.data_source(data, RankCoord(0, 1, 1))
    types = {index: type(layer).__name__ for index, layer in enumerate(layers)}
    file = FingerprintFile(
        folder, "plain", 0, dict(enumerate(layers)), types, chosen.pipeline.micro_batches, device.type
    )
    times, uses = Counter(map(id, layers)), Counter(map(id, named.values()))
    watched = {index: layer for index, layer in enumerate(layers) if times[id(layer)] == 1}
    shared = {(index, f"gradient of {name}") for (index, name), own in named.items() if uses[id(own)] > 1}

    def add(i: int, place: Place, tensor: Tensor) -> None:
        if (place.layer, place.what) not in shared:  # a pipeline has one for each layer, autograd their sum
            file.add_from_layer(i, place, tensor, device)

    for step in range(chosen.train.steps):
        _add_parameters(file, "initial", layers)
        batch = source.batch(step)
        assert batch is not None
        for i in range(len(batch)):
            with watch_tensors(watched, loss, partial(add, i)):
                backward(forward(layers, loss, batch, i, chosen, step, device), batch.divisor)
        _sum_copies(parameters, copies)
        for (index, name), parameter in named.items():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            file.add(None, index, f"whole gradient of {name}", parameter.grad)
        _clip(layers, parameters.values(), chosen.optimizer.max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, chosen.optimizer) * group["lr_factor"]
        optimizer.step()
        optimizer.zero_grad()
        _add_parameters(file, "updated", layers)
        for index, layer in enumerate(layers):
            file.add_buffers(index, layer)
        file.write(step + 1)
    dist.destroy_process_group()


def build_layers(
    chosen: Experiment, device: torch.device, logits_bytes: int = CPU_LOGITS_BYTES
) -> tuple[list[nn.Module], nn.Module]:
    """Returns all layers with their initial values, and the loss."""
    described, loss = chosen.build()
    set_logits_bytes(described, logits_bytes)
    seed = chosen.train.seed
    layers = chosen.own_layers(device) or [
        materialize(layer, initial_seed(seed, index), device) for index, layer in enumerate(described)
    ]
    nn.ModuleList(layers).train()  # as a script does; a layer may keep a part in evaluation mode
    for keys in _copies(layers).values():
        first, *others = (layers[index].get_parameter(name) for index, name in keys)
        for other in others:
            other.data.copy_(first.data)
    return layers, loss


def _trainable(layers: Sequence[nn.Module]) -> dict[Key, nn.Parameter]:
    return {
        (index, name): parameter
        for index, layer in enumerate(layers)
        for name, parameter in layer.named_parameters()
        if parameter.requires_grad
    }


def _distinct(named: Mapping[Key, nn.Parameter]) -> dict[Key, nn.Parameter]:
    """Returns each parameter once, by its first layer and name: layers of your own may share one."""
    keys = {id(parameter): key for key, parameter in reversed(list(named.items()))}
    return {key: parameter for key, parameter in named.items() if keys[id(parameter)] == key}


def forward(
    layers: Sequence[nn.Module],
    loss: nn.Module,
    batch: ReplicaBatch,
    i: int,
    chosen: Experiment,
    step: int,
    device: torch.device,
) -> Tensor:
    """Returns the objective of micro-batch ``i`` of ``batch``."""
    tensors, targets = (tuple(tensor.to(device) for tensor in each[i]) for each in (batch.inputs, batch.targets))
    stash: dict[str, Tensor] = {}
    bf16 = chosen.optimizer.precision == "bf16"
    with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
        for index, layer in enumerate(layers):
            set_seed(layer_seed(chosen.train.seed, step, batch.offset + i, index), device)
            inputs = (*tensors, *(stash.pop(name) for name in getattr(layer, "gpipe_pops", ())))
            if index == len(layers) - 1:
                return loss_of(layer, loss, inputs, targets)[0]
            outputs = as_tuple(layer(*inputs))
            if bf16:
                outputs = tuple(t.bfloat16() if t.dtype == torch.float32 else t for t in outputs)
            names = getattr(layer, "gpipe_stashes", ())
            stash.update(zip(names, outputs[len(outputs) - len(names) :], strict=True))
            tensors = outputs[: len(outputs) - len(names)]
    raise AssertionError("a model has layers")


def backward(objective: Tensor, divisor: float) -> None:
    """Adds the gradients of a micro-batch's share of the mean."""
    torch.autograd.backward(objective, torch.full_like(objective, 1 / divisor))


def _add_parameters(file: FingerprintFile, which: str, layers: Sequence[nn.Module]) -> None:
    for index, layer in enumerate(layers):
        for name, parameter in layer.named_parameters():
            file.add(None, index, f"{which} {name}", parameter)


def _copies(layers: Sequence[nn.Module]) -> dict[str, list[Key]]:
    """Returns the copies of each tied parameter, in layer order."""
    found: dict[str, list[Key]] = {}
    for index, layer in enumerate(layers):
        for name, tie in ties_of(layer).items():
            found.setdefault(tie, []).append((index, name))
    return found


def _sum_copies(parameters: Mapping[Key, nn.Parameter], copies: Mapping[str, Sequence[Key]]) -> None:
    for keys in copies.values():
        own = [parameters[key] for key in keys if key in parameters]
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in own]
        for parameter in own:
            parameter.grad = sum(gradients[1:], gradients[0]).clone()


def _clip(layers: Sequence[nn.Module], parameters: Collection[nn.Parameter], bound: float | None) -> None:
    """Scales the gradients so that their norm, in which tied copies count once, is at most ``bound``."""
    counted = {id(parameter) for _, _, parameter in distinct_parameters(layers)}
    squares = [
        torch.linalg.vector_norm(parameter.grad, dtype=torch.float64).square()
        for parameter in parameters
        if parameter.grad is not None and id(parameter) in counted
    ]
    norm = math.sqrt(float(sum(squares)))
    if bound is not None and norm > bound:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(bound / norm)
