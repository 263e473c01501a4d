"""What every worker did when, step by step: a file of lines for each, read back as timelines of the whole pipeline.

    {"replica": 0, "stage": 1, "stages": 2, "run": ..., "clock": -0.0312}   clock: seconds to add for rank 0's time
    {"step": 3, "began": 17.20, "spans": [["F", 0, 17.21, 17.25, 0], ...]}

Workers write as they go, each to its own file, so a run that dies leaves its trace; whoever reads brings the lines of
one step together.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from suite.pipeline.recorder import Recorder
from suite.pipeline.timeline import Span, Timeline
from suite.pipeline.topology import Place
from suite.training.lines import Lines

FIRST, COUNT = 2, 5
"""Steps traced unless all are: the first two after a start warm up, and five show how much steps differ."""


class TraceWriter:
    """One worker's trace. All workers must make theirs at once: they compare clocks."""

    def __init__(
        self, folder: Path, place: Place, device: torch.device, start: int, every_step: bool, run: str = ""
    ) -> None:
        """``start`` is the step that training begins at; lines of it and later steps in the file are dropped, and those
        of another ``run``: a text that says how the pipeline is cut, so that steps unlike each other are not compared.
        """
        folder.mkdir(parents=True, exist_ok=True)
        if place.rank == 0:
            _remove_others(folder, place)
        path = folder / f"{place.replica}-{place.stage}.jsonl"
        kept = list(_kept(path, start, place.stages, run))
        head = {
            "replica": place.replica, "stage": place.stage, "stages": place.stages, "run": run, "clock": clock_offset(),
        }  # fmt: skip
        self._file = Lines(path)
        for line in (*kept, head):
            self._file.write(line)
        self._recorder = Recorder(device)
        self._traced = None if every_step else range(start + FIRST, start + FIRST + COUNT)

    def recorder(self, step: int) -> Recorder | None:
        """Returns what notes this step's spans, begun; None for a step that is not traced."""
        if self._traced is not None and step not in self._traced:
            return None
        self._recorder.begin()
        return self._recorder

    def write(self, step: int, recorder: Recorder) -> None:
        """Writes the spans of a step."""
        spans = [
            [span.kind, span.micro_batch, round(span.start, 6), round(span.end, 6), span.turn]
            for span in recorder.spans()
        ]
        self._file.write({"step": step, "began": round(recorder.began, 6), "spans": spans})


def _remove_others(folder: Path, place: Place) -> None:
    """Removes what workers wrote that the run no longer has, since it goes on with fewer stages or replicas."""
    names = {f"{replica}-{stage}.jsonl" for replica in range(place.replicas) for stage in range(place.stages)}
    for path in folder.glob("*.jsonl"):
        if path.name not in names:
            path.unlink()


def _kept(path: Path, start: int, stages: int, run: str) -> Iterator[dict[str, Any]]:
    """Yields the heads and the steps before ``start`` of a pipeline cut alike, over as many stages."""
    alike = False
    for line in _lines(path):
        if "clock" in line:
            alike = line["stages"] == stages and line.get("run", "") == run
        if alike and line.get("step", -1) < start:
            yield line


def clock_offset() -> float:
    """Returns the seconds to add to this host's monotonic clock to have that of rank 0's host.

    Processes of one host share a clock. Between hosts it is read at the end of a barrier, to about a message's time.
    """
    dist.barrier()
    mine: Any = (socket.gethostname(), time.monotonic())
    clocks: list[Any] = [mine]
    dist.broadcast_object_list(clocks, src=0)
    host, first = clocks[0]
    return 0.0 if host == mine[0] else float(first - mine[1])


@dataclass(frozen=True)
class StepTrace:
    """One step of one replica, as measured: seconds count from its first worker's begin."""

    step: int
    replica: int
    began: float
    timeline: Timeline


Steps = dict[int, tuple[float, list[Span]]]
"""When each step began, and its spans."""


def read_traces(folder: Path) -> list[StepTrace]:
    """Returns the steps that all stages of a replica have traced, in order; empty where there is no trace."""
    replicas: dict[int, dict[int, Steps]] = {}
    expected: dict[int, int] = {}
    for path in sorted(folder.glob("*.jsonl")):
        head, steps = _worker(path)
        if head is not None:
            replicas.setdefault(head["replica"], {})[head["stage"]] = steps
            expected[head["replica"]] = head["stages"]
    found = []
    for replica, stages in sorted(replicas.items()):
        whole = [stages.get(stage, {}) for stage in range(expected[replica])]
        for step in sorted(set.intersection(*map(set, whole))):
            rows = [steps[step] for steps in whole]
            began = min(begin for begin, _ in rows)
            moved = tuple(tuple(_moved(span, -began) for span in spans) for _, spans in rows)
            found.append(StepTrace(step, replica, began, Timeline(moved)))
    return found


def _worker(path: Path) -> tuple[dict[str, Any] | None, Steps]:
    """Returns the last head of a file, None where not even that was written, and its steps in the time of rank 0."""
    head: dict[str, Any] | None = None
    steps: Steps = {}
    for line in _lines(path):
        if "clock" in line:
            head = line
        elif head is not None:
            clock = head["clock"]
            spans = [_moved(Span(*span), clock) for span in line["spans"]]
            steps[line["step"]] = line["began"] + clock, spans
    return head, steps


def _moved(span: Span, by: float) -> Span:
    return replace(span, start=span.start + by, end=span.end + by)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the whole lines of a file; one cut off by a crash ends it."""
    if not path.exists():
        return
    for line in path.read_text().splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            return


def perfetto(traces: list[StepTrace]) -> dict[str, Any]:
    """Returns the traces in the Trace Event Format that Perfetto opens: a process a replica, a thread a stage.

    Times in microseconds from the first traced step's begin.
    """
    names = {"F": "forward", "R": "rebuild", "B": "backward", "W": "weights", "U": "update"}
    zero = min((trace.began for trace in traces), default=0.0)
    events: list[dict[str, Any]] = []
    for trace in traces:
        for stage, row in enumerate(trace.timeline.rows):
            place = {"pid": trace.replica, "tid": stage}
            events += [
                {
                    "name": str(span), "cat": names[span.kind], "ph": "X", **place,
                    "ts": 1e6 * (trace.began - zero + span.start), "dur": 1e6 * span.seconds,
                    "args": {"step": trace.step, "micro_batch": span.micro_batch, "turn": span.turn},
                }
                for span in row
            ]  # fmt: skip
    for replica, stage in sorted({(trace.replica, k) for trace in traces for k in range(len(trace.timeline.rows))}):
        head: dict[str, Any] = {"pid": replica, "tid": stage, "ph": "M"}
        events.append({"name": "process_name", "args": {"name": f"replica {replica}"}, **head})
        events.append({"name": "thread_name", "args": {"name": f"stage {stage}"}, **head})
    return {"traceEvents": events, "displayTimeUnit": "ms"}
