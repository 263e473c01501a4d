"""A dry run beside the plan of a Transformer, with several schedules."""

from __future__ import annotations

from dataclasses import replace

import pytest

from experiments.base.cluster import Cluster, parse_cluster
from experiments.planning.planner import estimated_costs, try_plan
from experiments.registry import find
from experiments.tasks import workload
from launch.planning.dry_run import live_bytes
from suite.pipeline.planning.memory import UNCOUNTED_BYTES

CUDA = parse_cluster("1x2xH100", Cluster(2, 8 << 30, "cpu"))
CPU_FORMATS = replace(CUDA, device=replace(CUDA.device, is_cuda=False))
SMALL = (
    "model.layers=2 model.width=256 model.feed_forward=1024 model.heads=4 text.vocabulary=2000 pipeline.replicas=1 "
    "pipeline.stages=2 pipeline.micro_batches=6 train.batch_tokens=6144 "
)
LOSSES = 64
"""Bytes of the micro-batches' losses, which a plan does not count one by one."""


@pytest.mark.parametrize(
    "settings",
    [
        "pipeline.schedule=fill_drain pipeline.remat=except_last",
        "pipeline.schedule=fill_drain pipeline.remat=never",
        "pipeline.schedule=1f1b pipeline.remat=never",
        "pipeline.schedule=interleaved pipeline.virtual_stages=2 pipeline.remat=always",
        "pipeline.schedule=zero_bubble pipeline.remat=never",
    ],
)
@pytest.mark.parametrize(("cluster", "most"), [(CPU_FORMATS, 1.05), (CUDA, 1.1)], ids=["cpu_formats", "cuda"])
def test_a_plan_has_room_for_its_dry_run_and_hardly_more(settings: str, cluster: Cluster, most: float) -> None:
    """On CUDA devices a norm saves an fp32 copy instead of the bf16 tensor between two layers; a plan counts both."""
    planned = try_plan(workload(find("t12_400m").with_settings(SMALL + settings)), cluster, estimated_costs)
    for stage in range(2):
        cell = planned.plan.cells[stage]
        expected = cell.peak_bytes - cell.process_bytes - UNCOUNTED_BYTES
        walked = live_bytes(planned, stage)
        assert walked <= expected + LOSSES, f"stage {stage}"
        assert expected <= most * walked, f"stage {stage}"
