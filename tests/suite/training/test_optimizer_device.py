"""DeepSpeed leaves a stage on its worker's own device. A small layer and DeepSpeed's accelerator note where it goes."""

import os

import pytest
import torch
from torch import nn

from launch.backends.processes import run_processes
from suite.pipeline.model.topology import RankCoord, make_groups
from suite.settings import OptimizerSettings
from suite.training.optimizer import ReplicatedState
from tests.suite.pipeline.build import join


class Layer(nn.Linear):
    """Remembers where it is moved, and stays where it is."""

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
    coord = RankCoord(rank, 1, 1)
    parameters = {(0, name): parameter for name, parameter in layer.named_parameters()}
    groups = make_groups(coord, 60.0, ())
    factors = dict.fromkeys(parameters, (1.0, 1.0))
    ReplicatedState(layer, parameters, OptimizerSettings(), coord, groups, torch.device("cuda", index), factors)
    return current, layer.moved_to


@pytest.mark.parametrize("index", [0, 3])
def test_deepspeed_takes_the_gpu_of_the_worker(index):
    """Also under Ray: its agents share CUDA_VISIBLE_DEVICES, so the index is the GPU's among all of the node."""
    ((current, moved_to),) = run_processes(devices_chosen, 1, index)
    assert set(current) == {index}
    assert set(moved_to) == {f"cuda:{index}"}
