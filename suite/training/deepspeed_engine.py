"""Starts the DeepSpeed engine of a stage over its replicas."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch
from torch import nn

from suite.pipeline.model.topology import Group, ProcessGroups, RankCoord


class _DeepSpeedTopology:
    """The data-parallel and model-parallel groups in DeepSpeed's ``mpu`` interface."""

    def __init__(self, coord: RankCoord, groups: ProcessGroups) -> None:
        self._coord, self._groups = coord, groups

    def get_data_parallel_group(self) -> Group:
        return self._groups.replicas

    def get_data_parallel_rank(self) -> int:
        return self._coord.replica

    def get_data_parallel_world_size(self) -> int:
        return self._coord.replicas

    def get_model_parallel_group(self) -> Group:
        return self._groups.stages

    def get_model_parallel_rank(self) -> int:
        return self._coord.stage

    def get_model_parallel_world_size(self) -> int:
        return self._coord.stages


def initialize(
    module: nn.Module, inner: torch.optim.Optimizer, coord: RankCoord, groups: ProcessGroups, zero_stage: int
) -> Any:
    """Returns the engine. Its own clipping and norm are off: they ignore ties, depend on K, and the norm would cost two
    all-reduces per step."""
    os.environ.update(RANK=str(coord.rank), WORLD_SIZE=str(coord.stages * coord.replicas))
    os.environ.setdefault("LOCAL_RANK", "0")
    if not torch.cuda.is_available():
        os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    deepspeed.utils.logger.setLevel(logging.ERROR)
    # otherwise DeepSpeed compiles an all-reduce kernel for inference at the first start, for half a minute
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    for parameter in module.parameters():
        parameter.model_parallel = True  # type: ignore[attr-defined]  # otherwise DeepSpeed treats stages as copies
    engine, *_ = deepspeed.initialize(
        model=module, optimizer=inner, mpu=_DeepSpeedTopology(coord, groups), dist_init_required=False,
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "zero_optimization": {
                "stage": zero_stage, "overlap_comm": False, "contiguous_gradients": False,
                "compute_grad_norm": not zero_stage,  # not a valid option without ZeRO
            },
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 0.0,
        },
    )  # fmt: skip
    return engine
