"""What the machines at hand can hold, as plain numbers; who finds them out is no concern of an experiment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

GIB = 2**30


@dataclass(frozen=True)
class Cluster:
    """``devices`` in all: accelerators where kind is gpu, cores where it is cpu (each with its share of the memory)."""

    devices: int
    bytes_per_device: int
    kind: Literal["cpu", "gpu"]

    def __str__(self) -> str:
        word = "GPU" if self.kind == "gpu" else "CPU core"
        return (
            f"{self.devices} {word}{'' if self.devices == 1 else 's'} with {self.bytes_per_device / GIB:.1f} GiB each"
        )
