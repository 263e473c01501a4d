"""What each worker takes of its machine: processor, memory, waits; written by a thread of its own, beside the training.

    runs/<name>/<id>/system/0-2.jsonl     replica 0, stage 2: a line every ten seconds, and one at the end

The worker that speaks reads the others' last lines from there, so no message for it stands in a step. On a GPU the
stream waits for other stages' tensors and the process goes on: how busy the device is takes the place of the waits.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import torch

from suite.pipeline.doing import Doing
from suite.pipeline.topology import Place
from suite.training.lines import last_line, reopened
from suite.training.recurring import Recurring

PERIOD = 10.0


class Gauges:
    """A context in which a worker notes what it takes of its machine.

    Each line has the steps done, the attempt, ``cpu_percent`` (100 for one core busy all the time) and
    ``resident_bytes``; on a CPU ``waiting_percent``, the share of time in which it waited for other stages' tensors; on
    a GPU ``gpu_allocated_bytes``, ``gpu_reserved_bytes`` and, where its driver can be asked, ``gpu_percent``.
    """

    def __init__(self, folder: Path, place: Place, attempt: int, doing: Doing, device: torch.device) -> None:
        folder.mkdir(exist_ok=True)
        self._folder, self._place, self._attempt, self._doing = folder, place, attempt, doing
        self._start = doing.start or 0
        self._lines = reopened(path_of(folder, place.replica, place.stage), self._start)
        self._device, self._asks_device = device, device.type == "cuda"
        self._process = psutil.Process()
        self._since, self._waited = time.monotonic(), doing.deadline.waited_now()
        self._newest: dict[str, float] = {}
        self._recurring = Recurring(self._look_round, PERIOD, "gauges")
        self._process.cpu_percent()  # what it says next is of the time since

    def __enter__(self) -> Gauges:
        self._recurring.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._recurring.end():
            self._note()
            self._lines.close()

    def look(self) -> None:
        """Reads what all workers of this attempt have noted last."""
        found: dict[str, float] = {}
        for replica in range(self._place.replicas):
            for stage in range(self._place.stages):
                line = last_line(path_of(self._folder, replica, stage))
                if line is None or line.get("attempt") != self._attempt:
                    continue
                gauged = {name: value for name, value in line.items() if name not in ("step", "attempt")}
                found |= {f"stage/{replica}.{stage}/{name}": value for name, value in gauged.items()}
        self._newest = found

    def newest(self) -> dict[str, float]:
        """Returns what was read since it was last asked for, as ``stage/0.2/resident_bytes``; waits for nothing."""
        newest, self._newest = self._newest, {}
        return newest

    def _look_round(self) -> None:
        self._note()
        if self._place.speaks:
            self.look()

    def _note(self) -> None:
        line: dict[str, Any] = {"step": self._start + self._doing.steps, "attempt": self._attempt}
        line["cpu_percent"] = self._process.cpu_percent()
        line["resident_bytes"] = self._process.memory_info().rss
        self._lines.write(line | (self._of_device() if self._device.type == "cuda" else self._of_waits()))

    def _of_waits(self) -> dict[str, float]:
        now, waited = time.monotonic(), self._doing.deadline.waited_now()
        share = (waited - self._waited) / max(now - self._since, 1e-9)
        self._since, self._waited = now, waited
        return {"waiting_percent": 100 * min(max(share, 0.0), 1.0)}

    def _of_device(self) -> dict[str, float]:
        gauged: dict[str, float] = {
            "gpu_allocated_bytes": torch.cuda.memory_allocated(self._device),
            "gpu_reserved_bytes": torch.cuda.memory_reserved(self._device),
        }
        if self._asks_device:
            try:
                gauged["gpu_percent"] = torch.cuda.utilization(self._device)
            except Exception as error:  # the driver's library may be missing, or not answer for a part of a device
                self._asks_device = False
                print(f"how busy the GPU is cannot be told: {error}", file=sys.stderr, flush=True)
        return gauged


def path_of(folder: Path, replica: int, stage: int) -> Path:
    """Returns the file of one worker."""
    return folder / f"{replica}-{stage}.jsonl"
