"""``python -m tests.slow.bits``: hashes of a small model's weights after five steps in bf16, by K and schedule.

It runs on a GPU if there is one, which serves all workers (``tests.gpu.workers``), so K = 4 over NCCL needs one.
Fill-drain runs the backwards of micro-batches from the last to the first, the others from the first to the last: two
orders of the same sums, so two hashes.
"""

import hashlib
from dataclasses import replace

import torch

from launch.backends.processes import run_processes
from launch.worker.build import PartitionedModel, make_executor, make_stage_optimizer
from models.loss import TranslationLoss
from models.shape import TransformerShape
from models.transformer import layers
from suite import device as device_kinds
from suite.pipeline.planning.partition import cell_ranges
from suite.pipeline.schedule.config import V_SHAPED, ScheduleConfig
from suite.settings import OptimizerSettings
from tests.gpu import workers
from tests.gpu.work import make_batch

SHAPE = TransformerShape(4, 256, 1024, 4, 1000, dropout=0.1)

CASES = (
    [(1, ScheduleConfig("fill_drain", (4,)))]
    + [(stages, ScheduleConfig("fill_drain")) for stages in (1, 2, 4)]
    + [(stages, ScheduleConfig("1f1b", (stages,))) for stages in (1, 2, 4)]
    + [(2, ScheduleConfig("interleaved", (2,), 2)), (2, ScheduleConfig("zero_bubble", (2,)))]
    + [(stages, ScheduleConfig(name, (2,), 2)) for stages in (2, 4) for name in V_SHAPED]
)
"""K and schedule, with the most graphs alive and the cells a stage."""


def weights_after(stages: int, config: ScheduleConfig, steps: int = 5, compiles: bool = False) -> str:
    """Returns the hash of all weights; with ``compiles`` CPUs compile what GPUs do (``suite.device.fused``)."""
    found = run_processes(_train, stages, stages, torch.cuda.is_available(), config, steps, compiles)
    return hashlib.sha256(str(sorted(pair for own in found for pair in own.items())).encode()).hexdigest()[:12]


def _train(
    rank: int,
    world: int,
    rendezvous: str,
    stages: int,
    use_gpu: bool,
    config: ScheduleConfig,
    steps: int,
    compiles: bool,
) -> dict[str, str]:
    """Returns the hash of each parameter of one stage."""
    if compiles:
        device_kinds.COMPILES = ("cpu", *device_kinds.COMPILES)
    device, coord = workers.join(rank, world, rendezvous, stages, use_gpu)
    with torch.device("meta"):
        model = layers(SHAPE)
    coord = replace(coord, cell_to_stage=config.cell_to_stage(stages))
    cells = stages * config.virtual_stages
    counts = [len(model) // cells + (at < len(model) % cells) for at in range(cells)]
    partitioned = PartitionedModel(model, TranslationLoss(0.1), cell_ranges(counts, len(model)), config)
    executor, groups = make_executor(coord, partitioned, device, "bf16", 0, workers.new_status())
    settings = OptimizerSettings(learning_rate=1e-3, warmup_steps=1)
    optimizer = make_stage_optimizer(executor, groups, partitioned, settings)
    for step in range(steps):
        batch = make_batch(SHAPE, step) if coord.is_first or coord.has_loss else None
        optimizer.update(executor.train(batch, step), step)
    found = {
        key: hashlib.sha256(parameter.detach().cpu().numpy().tobytes()).hexdigest()
        for key, parameter in workers.parameters(executor.stage).items()
    }
    workers.leave()
    return found


def main() -> None:
    """Prints a table."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "the CPU"
    print(f"on {device}, torch {torch.__version__}\nK  schedule     graphs  cells a stage  weights")
    for stages, config in CASES:
        graphs, cells = config.max_live_graphs[0], config.virtual_stages
        digest = weights_after(stages, config)
        print(f"{stages}  {config.schedule:11}  {graphs:6}  {cells:13}  {digest}", flush=True)


if __name__ == "__main__":
    main()
