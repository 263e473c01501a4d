"""The benchmark's entrants, the suite's own and its peers: one line of data each."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from launch.worker.build import PartitionedModel, make_executor, make_stage_optimizer
from suite.pipeline.planning.memory_tracker import keep_freed_memory
from suite.pipeline.planning.partition import cell_ranges
from tests.bench.peers.cell import OneProcess
from tests.bench.peers.deepspeed_pipeline import DeepSpeedPipeline
from tests.bench.peers.peer import BenchContext, Entrant, Gradients
from tests.bench.peers.torch_pipelining import REFUSED_BY_SPLIT_BACKWARD, TorchPipelining
from tests.bench.peers.workload import SEED


class Suite:
    """The executor and the gradient reduction of a run, without the update."""

    def __init__(self, context: BenchContext, name: str) -> None:
        """Executes the plan of that name, in a process that keeps freed memory like a run's workers."""
        keep_freed_memory()
        work, (planned, schedule_config) = context.work, context.plans[name]
        place = replace(context.coord, cell_to_stage=schedule_config.cell_to_stage(work.stages))
        layers, loss = work.build()
        model = PartitionedModel(layers, loss, cell_ranges(planned, len(layers)), schedule_config)
        self._executor, groups = make_executor(place, model, torch.device("cpu"), work.optimizer.precision, SEED)
        self._optimizer = make_stage_optimizer(self._executor, groups, model, work.optimizer)
        self._batch = context.batch if place.is_first or place.has_loss else None

    def step(self) -> None:
        self._executor.train(self._batch, 0)
        self._optimizer.finish_reduction()

    def gradients(self) -> Gradients:
        """Returns this stage's full gradients, even if a worker holds only a shard of them."""
        return {key: self._optimizer.gradient(key) for key in self._executor.stage.named_parameters()}

    def clear(self) -> None:
        self._optimizer.clear()


WITH_ACTIVATIONS = ("sleeping", "layers", "translation", "replicas")
"""Workloads whose memory is more than what plans do not count."""


def _suite(name: str, memory_of: str | None = None, **settings: str | int) -> Entrant:
    recomputes = settings["remat"] != "never" and memory_of is None
    given = tuple(settings.items())
    workloads = WITH_ACTIVATIONS if memory_of is not None else ()
    return Entrant(
        name, partial(Suite, name=name), recomputes, settings=given, memory_of=memory_of, workloads=workloads
    )


RECOMPUTED, AHEAD = "suite fill-drain, recomputed", "suite 1F1B"

OURS = (
    _suite(RECOMPUTED, remat="except_last"),
    _suite("suite fill-drain", remat="never"),
    _suite(AHEAD, remat="never", schedule="1f1b"),
    _suite("suite interleaved, recomputed", remat="except_last", schedule="interleaved", virtual_stages=2),
    _suite("suite interleaved", remat="never", schedule="interleaved", virtual_stages=2),
    _suite("suite zero-bubble", remat="never", schedule="zero_bubble"),
    _suite("suite interleaved zero-bubble", remat="never", schedule="zero_bubble", virtual_stages=2),
    _suite("suite auto", remat="never", schedule="auto"),
    _suite("suite auto in the memory of 1F1B", AHEAD, remat="auto", schedule="auto"),
    _suite("suite auto in the memory of fill-drain, recomputed", RECOMPUTED, remat="auto", schedule="auto"),
)
"""Each line is an entrant: any combination of ``PipelineSettings`` besides K, M and R."""

COMPUTING = ("layers", "translation")


def _torch(name: str, schedule: str, recompute: bool, virtual_stages: int = 1) -> Entrant:
    build = partial(TorchPipelining, schedule=schedule, recompute=recompute, virtual_stages=virtual_stages)
    refused = REFUSED_BY_SPLIT_BACKWARD if "ZeroBubble" in schedule else {}
    return Entrant(name, build, recompute, virtual_stages=virtual_stages, refused=refused)


PEERS = (
    _torch("torch GPipe, recomputed", "GPipe", True),
    _torch("torch GPipe", "GPipe", False),
    _torch("torch 1F1B, recomputed", "1F1B", True),
    _torch("torch 1F1B", "1F1B", False),
    _torch("torch interleaved 1F1B, recomputed", "Interleaved1F1B", True, virtual_stages=2),
    _torch("torch interleaved 1F1B", "Interleaved1F1B", False, virtual_stages=2),
    _torch("torch interleaved zero-bubble", "InterleavedZeroBubble", False, virtual_stages=2),
    _torch("torch ZBV zero-bubble", "ZBVZeroBubble", False, virtual_stages=2),
    Entrant("DeepSpeed 1F1B, recomputed", partial(DeepSpeedPipeline, recompute=True), True),
    Entrant("DeepSpeed 1F1B", partial(DeepSpeedPipeline, recompute=False), False),
    Entrant("one process, one thread", partial(OneProcess, threads=1), False, workloads=COMPUTING),
    Entrant("one process, K threads", partial(OneProcess, threads=0), False, workloads=COMPUTING, threads=0),
)
"""Zero-bubble schedules have no row with recompute: they split the backward, and each half would recompute."""

ENTRANTS = (*OURS, *PEERS)
