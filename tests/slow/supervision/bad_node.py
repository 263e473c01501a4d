"""A worker's hook that fails on one node, whichever begins first, as a bad device does."""

import os
from contextlib import suppress
from pathlib import Path

import psutil


def fail(place: str, *worker) -> None:
    """``place`` is a file that names the bad node by the process of its raylet."""
    own = next(process.pid for process in psutil.Process().parents() if process.name() == "raylet")
    draft = Path(f"{place}.{os.getpid()}")
    draft.write_text(str(own))
    with suppress(FileExistsError):
        os.link(draft, place)
    if int(Path(place).read_text()) == own:
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
