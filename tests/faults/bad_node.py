"""Hooks of workers: one fails on one node, whichever begins first, as a bad device does; one is slow."""

import os
import time
from contextlib import suppress
from pathlib import Path

import psutil
from torch import nn


def fail(place: str, *worker) -> None:
    """``place`` is a file that names the bad node by the process of its raylet."""
    own = next(process.pid for process in psutil.Process().parents() if process.name() == "raylet")
    draft = Path(f"{place}.{os.getpid()}")
    draft.write_text(str(own))
    with suppress(FileExistsError):
        os.link(draft, place)
    if int(Path(place).read_text()) == own:
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered")


def be_slow(plan: str, coord, *rest) -> None:
    """The layers of the second replica take longer."""
    forward = nn.Linear.forward

    def delayed(*inputs):
        time.sleep(0.002)
        return forward(*inputs)

    if coord.replica == 1:
        nn.Linear.forward = delayed
