"""What DeepSpeed does in a worker: where it moves a stage, and what the end of its engine imports."""

import gc
import os
import sys

import numpy as np
import pytest
import torch
from torch import nn

from launch.backends.processes import run_processes
from suite.pipeline.model.topology import RankCoord, make_groups
from suite.settings import OptimizerSettings
from suite.training.optimizer import ReplicatedState, ShardedState
from tests.suite.pipeline.build import join


class Layer(nn.Linear):
    """Stands for a stage on a GPU: remembers where it is moved, and stays where it is."""

    def __init__(self):
        super().__init__(2, 2)
        self.moved_to = []

    def to(self, device):
        self.moved_to.append(str(device))
        return self


def devices_chosen(rank, world, rendezvous, index):
    """Returns the device that DeepSpeed makes current, and where it moves a stage of GPU ``index``."""
    join(rank, world, rendezvous)
    from deepspeed.accelerator import get_accelerator

    accelerator, current, layer = get_accelerator(), [], Layer()
    accelerator.set_device = current.append
    accelerator.device_name = lambda index=None: "cuda" if index is None else f"cuda:{index}"
    os.environ.update(LOCAL_RANK="0", OMPI_COMM_WORLD_LOCAL_RANK="0")  # what a launcher has left in the environment
    make_state(ReplicatedState, RankCoord(rank, 1, 1), layer, torch.device("cuda", index))
    return current, layer.moved_to


def make_state(kind, coord, layer, device):
    parameters = {(0, name): parameter for name, parameter in layer.named_parameters()}
    factors = dict.fromkeys(parameters, (1.0, 1.0))
    return kind(layer, parameters, OptimizerSettings(), coord, make_groups(coord, 60.0, ()), device, factors)


def test_deepspeed_takes_the_gpu_of_the_worker():
    """Also under Ray: StageActors share CUDA_VISIBLE_DEVICES, so the index is the GPU's among all of the node."""
    ((current, moved_to),) = run_processes(devices_chosen, 1, 3)
    assert set(current) == {3}
    assert set(moved_to) == {"cuda:3"}


def on_the_cpu(rank, world, rendezvous):
    """Returns where DeepSpeed moves a stage on the CPU if it was imported for a GPU, and which operators it has asked a
    compiler about."""
    join(rank, world, rendezvous)
    import deepspeed
    from deepspeed.accelerator import set_accelerator
    from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator

    def ask(*_):
        raise AssertionError("a compiler runs for a tenth of a second in each worker")

    set_accelerator(CUDA_Accelerator())
    deepspeed.ops._probe_compatible_ops = ask
    layer = Layer()
    make_state(ReplicatedState, RankCoord(rank, 1, 1), layer, torch.device("cpu"))
    return {*layer.moved_to}, deepspeed.ops.__compatible_ops__


def test_a_stage_on_the_cpu_stays_there_on_a_machine_with_a_gpu_and_no_compiler_is_asked():
    assert run_processes(on_the_cpu, 1) == [({"cpu"}, {})]


def modules_of_the_end(rank, world, rendezvous, kind):
    """Returns which modules the destructors of DeepSpeed's engine and of its optimizer load."""
    join(rank, world, rendezvous)
    state = make_state(kind, RankCoord(rank, 1, world), nn.Linear(2, 2), torch.device("cpu"))
    gc.collect()
    before = set(sys.modules)
    del state
    assert gc.collect() > 0
    return set(sys.modules) - before


@pytest.mark.parametrize(("kind", "replicas"), [(ReplicatedState, 1), (ShardedState, 2)])
def test_the_end_of_an_engine_loads_nothing(kind, replicas):
    """Garbage collection may run it amid another import, which then fails with a KeyError of importlib."""
    assert run_processes(modules_of_the_end, replicas, kind) == [set()] * replicas


def weights_after_a_step(rank, world, rendezvous):
    """Writes fives to the weights, and updates them without a gradient; returns them."""
    join(rank, world, rendezvous)
    layer = nn.Linear(2, 2)
    state = make_state(ShardedState, RankCoord(rank, 1, world), layer, torch.device("cpu"))
    with torch.no_grad():
        layer.weight.fill_(5)
    state.accept_values([layer.weight])
    for parameter in layer.parameters():
        parameter.grad = torch.zeros_like(parameter)
    state.local_gradients()
    state.step(1e-6)
    return layer.weight.tolist()


def test_values_that_are_accepted_are_those_that_the_next_step_updates():
    """DeepSpeed's shards are copies, from which it writes the parameters after each step."""
    for weights in run_processes(weights_after_a_step, 2):
        assert np.allclose(weights, 5, atol=1e-3)
