"""The benchmark's entrants beside the suite, one line of data each."""

from __future__ import annotations

from functools import partial

from experiments.benchmark.peers.deepspeed_pipeline import DeepSpeedPipeline
from experiments.benchmark.peers.one_process import OneProcess
from experiments.benchmark.peers.peer import Entrant
from experiments.benchmark.peers.torch_pipelining import REFUSED_BY_SPLIT_BACKWARD, TorchPipelining

COMPUTING = ("layers", "translation")


def _torch(name: str, schedule: str, recompute: bool, virtual_stages: int = 1, v_shaped: bool = False) -> Entrant:
    build = partial(
        TorchPipelining, schedule=schedule, recompute=recompute, virtual_stages=virtual_stages, v_shaped=v_shaped
    )
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
    _torch("torch ZBV zero-bubble", "ZBVZeroBubble", False, virtual_stages=2, v_shaped=True),
    Entrant("DeepSpeed 1F1B, recomputed", partial(DeepSpeedPipeline, recompute=True), True),
    Entrant("DeepSpeed 1F1B", partial(DeepSpeedPipeline, recompute=False), False),
    Entrant("one process, one thread", partial(OneProcess, threads=1), False, workloads=COMPUTING),
    Entrant("one process, K threads", partial(OneProcess, threads=0), False, workloads=COMPUTING, threads=0),
)
"""Zero-bubble schedules have no row with recompute: they split the backward, and each half would recompute."""
