"""K = 2 by two processes, compared with the same stages in one process on the CPU.

The processes use gloo on the CPU and NCCL on two GPUs. One GPU cannot hold both: NCCL refuses two ranks on one device
(NVIDIA/nccl#418), and gloo sends no CUDA tensors.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from launch.gpu_check import gradients
from launch.gpu_check.single_stage import seconds
from launch.gpu_check.work import SCHEDULE_CONFIG, Sizes, SkippedError
from launch.worker.distributed import init_process_group
from launch.worker.links import make_links
from suite.device import is_host, module_of
from suite.pipeline.model.microbatch import MiniBatch
from suite.pipeline.model.topology import RankCoord, make_groups, transport_of
from suite.pipeline.runtime.executor import Executor
from suite.pipeline.runtime.p2p import Deadline
from suite.pipeline.runtime.skip import communicating_pairs, find_skips

DEADLINE_S = 60.0


def measure_two_stages(sizes: Sizes, device: torch.device) -> dict[str, Any]:
    """Trains one mini-batch at K = 2 and compares all gradients, in fp32. Raises SkippedError with one GPU."""
    if not is_host(device) and module_of(device).device_count() < 2:
        raise SkippedError(
            "NCCL refuses two ranks on one GPU, and gloo sends no CUDA tensors; it runs where torch sees two"
        )
    batch, margin = gradients.choose_batch(sizes)
    stages = run_spawned(_run_stage, 2, device.type, sizes, batch)
    found = stages[0]["gradients"] | stages[1]["gradients"]
    with gradients.exact():
        here = gradients.stages_of(sizes.gradients, torch.float32, gradients.CPU)
        for rank, stage in enumerate(here):
            stage.layers.load_state_dict(stages[rank]["weights"])
        expected = gradients.run_batch(sizes.gradients, here, batch)
    compared = gradients.difference(expected, found, sizes.gradients, torch.float32, batch, margin)
    return {
        "backend": stages[0]["backend"], "stages": 2, "comparisons": [compared.record()],
        "measured": {"step_s": max(stage["step_s"] for stage in stages)},
        "faults": [f"K = 2: {compared.fault}"] if compared.fault else [],
    }  # fmt: skip


def run_spawned(run: Callable[..., None], world: int, *arguments: Any) -> list[Any]:
    """Calls ``run(rank, folder, world, *arguments)`` in fresh processes; returns what each saves as <rank>.pt."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(run, args=(folder, world, *arguments), nprocs=world)  # type: ignore[no-untyped-call]
        return [torch.load(Path(folder) / f"{rank}.pt") for rank in range(world)]


def _run_stage(rank: int, folder: str, world: int, kind: str, sizes: Sizes, batch: MiniBatch) -> None:
    gpu = rank if kind == "cuda" else None
    device = init_process_group(rank, world, f"file://{folder}/rendezvous", 1, gpu, DEADLINE_S)
    made, _ = gradients.model(sizes.gradients, torch.float32)
    cells, coord = gradients.cells_of(sizes.gradients), RankCoord(rank, world, 1)
    groups = make_groups(coord, DEADLINE_S, communicating_pairs(find_skips(made), cells, 2))
    stage = gradients.stages_of(sizes.gradients, torch.float32, device)[rank]
    with gradients.exact():
        schedule_config = replace(SCHEDULE_CONFIG, transport=transport_of(device))
        links = make_links(coord, made, cells, groups, device, Deadline(DEADLINE_S), schedule_config)
        executor = Executor(coord, stage, links, schedule_config)
        executor.train(batch, 0)
        result = gradients.gradients_of([stage])
        step_s = seconds(lambda: executor.train(batch, 0), device)
    weights = {name: tensor.cpu() for name, tensor in stage.layers.state_dict().items()}
    result_file = Path(folder) / f"{rank}.pt"
    torch.save({"gradients": result, "weights": weights, "step_s": step_s, "backend": dist.get_backend()}, result_file)
    dist.barrier()
    dist.destroy_process_group()
