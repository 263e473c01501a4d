"""Each worker's use of its machine: processor, memory, waits. A thread writes it beside the training.

    runs/<name>/<id>/system/0-2.jsonl     replica 0, stage 2: one line every ten seconds, and one at the end

After half a day the lines become rarer, so that a month has 4 MB and a year 6.

The metrics rank reads the other workers' last lines from these files, so training steps send no messages for them. On a
GPU only the stream waits for other stages' tensors, not the process, so the device utilization replaces the waits.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import torch

from suite.device import is_host, module_of
from suite.pipeline.model.topology import RankCoord
from suite.pipeline.runtime.worker_status import WorkerStatus
from suite.training.jsonl import last_line, reopen
from suite.training.metrics import stage_metric
from suite.training.periodic import PeriodicThread

PERIOD = 10.0

MOST_WORKERS = 64
"""Of more, the metrics rank reads the lines less often, and reports their spread and the rank of the highest."""

MOST_LINES = 5000
"""A line comes once a share of 1 / MOST_LINES of the time so far has passed, and not before PERIOD."""


class SystemMetrics:
    """A context in which a worker records its use of its machine.

    Each line has the steps done, the attempt, ``cpu_percent`` (100 for one fully busy core) and ``resident_bytes``; on
    a CPU ``waiting_percent``, the share of time spent waiting for other stages' tensors; on a GPU
    ``gpu_allocated_bytes``, ``gpu_reserved_bytes`` and, if the driver reports it, ``gpu_percent``.
    """

    def __init__(
        self, folder: Path, coord: RankCoord, attempt: int, status: WorkerStatus, device: torch.device
    ) -> None:
        folder.mkdir(exist_ok=True)
        self._folder, self._coord, self._attempt, self._status = folder, coord, attempt, status
        self._start = status.first_step or 0
        self._lines = reopen(path_of(folder, coord.replica, coord.stage), self._start)
        self._device, self._queries_driver = device, True
        self._began = self._due = self._sample_due = time.monotonic()
        self._process = psutil.Process()
        self._sampled_at, self._waited_s = time.monotonic(), status.message_timeout.total_waited_s()
        self._newest: dict[str, float] = {}
        self._thread = PeriodicThread(self._write_and_sample, PERIOD, "system metrics")
        self._process.cpu_percent()  # the next call measures from here

    def __enter__(self) -> SystemMetrics:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread.end():
            self._write()
            self._lines.close()

    def sample(self) -> None:
        """Reads the last line of every worker of this attempt."""
        newest: dict[tuple[int, int], dict[str, float]] = {}
        for replica in range(self._coord.replicas):
            for stage in range(self._coord.stages):
                line = last_line(path_of(self._folder, replica, stage))
                if line is not None and line.get("attempt") == self._attempt:
                    values = {name: value for name, value in line.items() if name not in ("step", "attempt")}
                    newest[replica, stage] = values
        many = self._coord.stages * self._coord.replicas > MOST_WORKERS
        self._newest = spread(newest, self._coord.stages) if many else each_of(newest)

    def latest(self) -> dict[str, float]:
        """Returns the metrics read since the last call, named like ``pipeline/stage.0.2/resident_bytes``, without
        waiting."""
        newest, self._newest = self._newest, {}
        return newest

    def _write_and_sample(self) -> None:
        if (now := time.monotonic()) < self._due:
            return
        self._due = now + (now - self._began) / MOST_LINES - PERIOD / 2  # half: calls come a little late or early
        self._write()
        if self._coord.is_metrics_rank and now >= self._sample_due:
            self._sample_due = now + PERIOD * (self._coord.stages * self._coord.replicas / MOST_WORKERS - 0.5)
            self.sample()

    def _write(self) -> None:
        line: dict[str, Any] = {"step": self._start + self._status.steps_done, "attempt": self._attempt}
        line["cpu_percent"] = self._process.cpu_percent()
        line["resident_bytes"] = self._process.memory_info().rss
        self._lines.write(line | (self._wait_metrics() if is_host(self._device) else self._gpu_metrics()))

    def _wait_metrics(self) -> dict[str, float]:
        now, waited_s = time.monotonic(), self._status.message_timeout.total_waited_s()
        share = (waited_s - self._waited_s) / max(now - self._sampled_at, 1e-9)
        self._sampled_at, self._waited_s = now, waited_s
        return {"waiting_percent": 100 * min(max(share, 0.0), 1.0)}

    def _gpu_metrics(self) -> dict[str, float]:
        gpu = module_of(self._device)
        metrics: dict[str, float] = {
            "gpu_allocated_bytes": gpu.memory_allocated(self._device),
            "gpu_reserved_bytes": gpu.memory_reserved(self._device),
        }
        if self._queries_driver:
            try:
                metrics["gpu_percent"] = gpu.utilization(self._device)
            except Exception as error:  # the driver's library may be missing, or not support a part of a device
                self._queries_driver = False
                print(f"GPU utilization is not available: {error}", file=sys.stderr, flush=True)
        return metrics


def each_of(values: Mapping[tuple[int, int], Mapping[str, float]]) -> dict[str, float]:
    """Returns the metrics of each worker, by replica and stage."""
    return {stage_metric(*worker, name): value for worker, own in values.items() for name, value in own.items()}


def spread(values: Mapping[tuple[int, int], Mapping[str, float]], stages: int) -> dict[str, float]:
    """Returns the lowest, median and highest value of each metric of all workers, and the rank with the highest."""
    found: dict[str, float] = {}
    for name in dict.fromkeys(name for own in values.values() for name in own):
        by_worker = {worker: own[name] for worker, own in values.items() if name in own}
        ranked = sorted(by_worker.values())
        places = {"min": 0, "median": len(ranked) // 2, "max": -1}
        found |= {f"pipeline/all/{name}_{what}": ranked[at] for what, at in places.items()}
        replica, stage = max(by_worker, key=by_worker.__getitem__)
        found[f"pipeline/all/{name}_max_rank"] = replica * stages + stage
    return found


def peak_bytes(device: torch.device) -> int:
    """Returns this process's peak memory so far: allocated memory of a GPU, otherwise resident memory.

    Resident pages that processes share are counted in each.
    """
    if not is_host(device):
        return int(module_of(device).max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def path_of(folder: Path, replica: int, stage: int) -> Path:
    return folder / f"{replica}-{stage}.jsonl"
