"""Traces of every worker's actions, step by step: one JSON-lines file per worker, read back as pipeline timelines.

    {"replica": 0, "stage": 1, "stages": 2, "run": ..., "clock": -0.0312}   clock: seconds to add to get rank 0's time
    {"step": 3, "began": 17.20, "spans": [["F", 0, 17.21, 17.25, 0], ...]}

Each worker writes to its own file during the run, so a run that dies leaves its trace. The reader joins the lines of a
step.
"""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from suite.exchange import broadcast
from suite.pipeline.model.topology import RankCoord
from suite.pipeline.runtime.recorder import Recorder
from suite.pipeline.schedule.timeline import Span, Timeline
from suite.training.jsonl import read_lines, remove_stale, reopen

FIRST, COUNT = 2, 5
"""Steps traced by default: skip the first two after a start, which warm up, and trace five to show the variation."""


class TraceWriter:
    """Writes one worker's trace. All workers must construct it together, because they compare clocks."""

    def __init__(
        self, folder: Path, coord: RankCoord, device: torch.device, start: int, every_step: bool, run: str = ""
    ) -> None:
        """Training begins at step ``start``; lines of this and later steps are dropped. ``run`` describes how the
        pipeline is partitioned; a reader drops steps of another ``run``, which are not comparable."""
        folder.mkdir(parents=True, exist_ok=True)
        if coord.rank == 0:
            remove_stale(folder, coord.replicas, coord.stages)
        self._file = reopen(folder / f"{coord.replica}-{coord.stage}.jsonl", start - 1)
        worker = {"replica": coord.replica, "stage": coord.stage, "stages": coord.stages}
        self._file.write({**worker, "run": run, "clock": clock_offset()})
        self._recorder, self._device = Recorder(device), device
        self._traced = None if every_step else range(start + FIRST, start + FIRST + COUNT)

    def recorder(self, step: int) -> Recorder | None:
        """Returns the started recorder for this step's spans; None for a step that is not traced."""
        if self._traced is not None and step not in self._traced:
            return None
        self._recorder.begin()
        return self._recorder

    def write(self, step: int, recorder: Recorder) -> None:
        spans = [span.as_list() for span in recorder.spans()]
        self._file.write({"step": step, "began": round(recorder.began, 6), "spans": spans})

    def bubble(self, recorder: Recorder) -> float:
        """Returns the idle share of all workers in the step that was recorded, its update included. All workers must
        call it."""
        spans = recorder.spans()
        busy_s, step_s = sum(span.seconds for span in spans), spans[-1].end - recorder.began
        rows = torch.zeros(2, dist.get_world_size(), dtype=torch.float64)
        rows[:, dist.get_rank()] = torch.tensor([busy_s, step_s])
        rows = rows.to(self._device, non_blocking=True)
        dist.all_reduce(rows)
        all_busy_s, steps_s = rows.cpu()
        return float(1 - all_busy_s.mean() / steps_s.max())


def clock_offset() -> float:
    """Returns the seconds to add to this host's monotonic clock to get that of rank 0's host.

    Processes on one host share a clock. Hosts read it after a barrier, so the error is about one message latency.
    """
    dist.barrier()
    own_host, own_seconds = socket.gethostname(), time.monotonic()
    host, seconds = broadcast([own_host, own_seconds])
    return 0.0 if host == own_host else float(seconds - own_seconds)


@dataclass(frozen=True)
class StepTrace:
    """One measured step of one replica. Times are in seconds from the start of its first worker."""

    step: int
    replica: int
    began: float
    timeline: Timeline


Steps = dict[int, tuple[float, list[Span]]]
"""When each step began, and its spans."""


def read_traces(folder: Path) -> list[StepTrace]:
    """Returns the steps that all stages of a replica have traced, in order; empty without a trace."""
    replicas: dict[int, dict[int, Steps]] = {}
    expected: dict[int, int] = {}
    for path in sorted(folder.glob("*.jsonl")):
        head, steps = _read_worker(path)
        if head is not None:
            replicas.setdefault(head["replica"], {})[head["stage"]] = steps
            expected[head["replica"]] = head["stages"]
    traces = []
    for replica, stages in sorted(replicas.items()):
        per_stage = [stages.get(stage, {}) for stage in range(expected[replica])]
        for step in sorted(set.intersection(*map(set, per_stage))):
            rows = [steps[step] for steps in per_stage]
            began = min(begin for begin, _ in rows)
            shifted = tuple(tuple(_shifted(span, -began) for span in spans) for _, spans in rows)
            traces.append(StepTrace(step, replica, began, Timeline(shifted)))
    return traces


def _read_worker(path: Path) -> tuple[dict[str, Any] | None, Steps]:
    """Returns the last header of a file, None without one, and the steps of its pipeline in rank 0's time."""
    head: dict[str, Any] | None = None
    steps: Steps = {}
    for line in read_lines(path):
        if "clock" in line:
            if head is not None and (head["stages"], head.get("run", "")) != (line["stages"], line.get("run", "")):
                steps.clear()
            head = line
        elif head is not None:
            clock = head["clock"]
            spans = [_shifted(Span(*span), clock) for span in line["spans"]]
            steps[line["step"]] = line["began"] + clock, spans
    return head, steps


def _shifted(span: Span, seconds: float) -> Span:
    return replace(span, start=span.start + seconds, end=span.end + seconds)


KIND_NAMES = {
    "F": "forward",
    "R": "recompute",
    "I": "backward (input)",
    "B": "backward",
    "W": "weight gradient",
    "U": "update",
}
"""What a person reads for each kind of action."""


def perfetto(traces: list[StepTrace]) -> dict[str, Any]:
    """Returns the traces in the Trace Event Format that Perfetto opens: one process per replica, one thread per stage.

    Times are in microseconds from the start of the first traced step.
    """
    zero = min((trace.began for trace in traces), default=0.0)
    events: list[dict[str, Any]] = []
    for trace in traces:
        for stage, row in enumerate(trace.timeline.rows):
            coord = {"pid": trace.replica, "tid": stage}
            events += [
                {
                    "name": str(span),
                    "cat": KIND_NAMES[span.kind],
                    "ph": "X",
                    **coord,
                    "ts": 1e6 * (trace.began - zero + span.start),
                    "dur": 1e6 * span.seconds,
                    "args": {"step": trace.step, "micro_batch": span.micro_batch, "virtual_stage": span.virtual_stage},
                }
                for span in row
            ]
    for replica, stage in sorted({(trace.replica, k) for trace in traces for k in range(len(trace.timeline.rows))}):
        head: dict[str, Any] = {"pid": replica, "tid": stage, "ph": "M"}
        events.append({"name": "process_name", "args": {"name": f"replica {replica}"}, **head})
        events.append({"name": "thread_name", "args": {"name": f"stage {stage}"}, **head})
    return {"traceEvents": events, "displayTimeUnit": "ms"}
