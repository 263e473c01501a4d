"""Who is timed beside the suite: one line of data each."""

from __future__ import annotations

from functools import partial

from experiments.peers.deepspeed_pipeline import DeepSpeedPipeline
from experiments.peers.one_process import OneProcess
from experiments.peers.peer import Contender, refuse_none
from experiments.peers.torch_pipelining import TorchPipelining, refuse_split
from experiments.peers.torchgpipe_threads import TorchGPipe, refusal

COMPUTING = ("layers", "translation")


def _torch(name: str, schedule: str, rebuild: bool, parts: int = 1, v_shaped: bool = False) -> Contender:
    build = partial(TorchPipelining, schedule=schedule, rebuild=rebuild, parts=parts, v_shaped=v_shaped)
    return Contender(
        name, build, rebuild, parts=parts, refuse=refuse_split if "ZeroBubble" in schedule else refuse_none
    )


def _torchgpipe(name: str, checkpoint: str) -> Contender:
    build, refuse = partial(TorchGPipe, checkpoint=checkpoint), partial(refusal, checkpoint=checkpoint)
    return Contender(name, build, checkpoint != "never", refuse=refuse, peak=False)


PEERS = (
    _torch("torch GPipe, rebuilt", "GPipe", True),
    _torch("torch GPipe", "GPipe", False),
    _torch("torch 1F1B, rebuilt", "1F1B", True),
    _torch("torch 1F1B", "1F1B", False),
    _torch("torch interleaved 1F1B, rebuilt", "Interleaved1F1B", True, parts=2),
    _torch("torch interleaved 1F1B", "Interleaved1F1B", False, parts=2),
    _torch("torch interleaved zero-bubble", "InterleavedZeroBubble", False, parts=2),
    _torch("torch ZBV zero-bubble", "ZBVZeroBubble", False, parts=2, v_shaped=True),
    Contender("DeepSpeed 1F1B, rebuilt", partial(DeepSpeedPipeline, rebuild=True), True),
    Contender("DeepSpeed 1F1B", partial(DeepSpeedPipeline, rebuild=False), False),
    _torchgpipe("torchgpipe, rebuilt", "except_last"),
    _torchgpipe("torchgpipe", "never"),
    Contender("one process, one thread", partial(OneProcess, threads=1), False, works=COMPUTING),
    Contender("one process, K threads", partial(OneProcess, threads=0), False, works=COMPUTING),
)
"""Zero-bubble schedules have no row with rebuilds: they split the backward in two, and each part would build again."""
