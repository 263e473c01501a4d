"""Weights after five steps in bf16 are the same bits for every K and M in flight, on a GPU if this machine has one.

One GPU serves all workers (``launch.gpu_check.workers``), so K = 4 over NCCL needs no more than one.
"""

import hashlib

import pytest
import torch

from launch.backends.processes import run_processes
from launch.gpu_check import workers
from launch.gpu_check.work import make_batch
from launch.worker.engine import PartitionedModel, make_executor, make_stage_optimizer
from models.loss import TranslationLoss
from models.shape import TransformerShape
from models.transformer import layers
from suite.pipeline.planning.partition import cell_ranges
from suite.pipeline.schedule.config import ScheduleConfig
from suite.settings import OptimizerSettings

SHAPE = TransformerShape(4, 256, 1024, 4, 1000, dropout=0.1)
STEPS = 5


def weights_after_steps(rank, world, rendezvous, stages, use_gpu, config):
    """Returns the hash of each of this stage's parameters, and the gradient norm of each step."""
    device, coord = workers._join(rank, world, rendezvous, stages, use_gpu)
    with torch.device("meta"):
        model = layers(SHAPE)
    cells = stages * config.virtual_stages
    counts = [len(model) // cells + (at < len(model) % cells) for at in range(cells)]
    partitioned = PartitionedModel(model, TranslationLoss(0.1), cell_ranges(counts, len(model)), config)
    executor, groups = make_executor(coord, partitioned, device, "bf16", 0, workers._status())
    settings = OptimizerSettings(learning_rate=1e-3, warmup_steps=1)
    optimizer = make_stage_optimizer(executor, groups, partitioned, settings)
    norms = []
    for step in range(STEPS):
        batch = make_batch(SHAPE, step) if coord.is_first or coord.is_last else None
        norms.append(optimizer.update(executor.train(batch, step), step).grad_norm)
    found = {
        key: hashlib.sha256(parameter.detach().cpu().numpy().tobytes()).hexdigest()
        for key, parameter in workers.parameters(executor.stage).items()
    }
    workers._leave()
    return found, norms


def run(stages, config):
    found = run_processes(weights_after_steps, stages, stages, torch.cuda.is_available(), config)
    return {key: digest for own, _ in found for key, digest in own.items()}, found[-1][1]


@pytest.mark.parametrize(
    ("alone", "others"),
    [
        # backwards run from the last micro-batch to the first
        (("fill_drain", 1, 1), [(1, "fill_drain", 4, 1), (2, "fill_drain", 1, 1), (4, "fill_drain", 1, 1)]),
        # and from the first to the last
        (("1f1b", 1, 1), [(2, "1f1b", 2, 1), (2, "interleaved", 2, 2), (2, "zero_bubble", 2, 1), (4, "1f1b", 4, 1)]),
    ],
)
def test_weights_do_not_depend_on_the_number_of_stages(alone, others):
    def config(schedule, graphs, virtual_stages):
        return ScheduleConfig(schedule, (graphs,), virtual_stages)

    expected = run(1, config(*alone))
    assert len(set(expected[0].values())) > STEPS  # they are not all zeros
    for stages, *settings in others:
        assert run(stages, config(*settings)) == expected, (stages, settings)
