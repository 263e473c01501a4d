"""The worker processes of a benchmark case, which stay alive and run one entrant's turn at a time.

    parent   asks for a turn of B ------------------------------> has the seconds of each step
    A's processes   wait, without computing
    B's processes   wait --> barrier, step, barrier, ... --> wait

Starting processes anew for each turn would take longer than the turns. All entrants in the same processes would crowd
each other: with twenty others in its memory, an entrant that computes is up to a tenth slower (measured).
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

from torch.distributed import DistStoreError, TCPStore  # type: ignore[attr-defined]

from experiments.benchmark.cases import Case
from experiments.benchmark.peers.peer import Entrant
from launch.backends.processes import run_processes
from suite.errors import WorkerError
from suite.pipeline.schedule.config import ScheduleConfig

DEADLINE_S = 3600.0
"""Longest life of a case's processes."""

TURN_S = 600.0
"""Longest turn, and longest time to build one entrant."""

_POLL_S = 0.5
"""Seconds between two looks whether the workers still live."""

END = "end"


@dataclass(frozen=True)
class BenchInputs:
    """The inputs of a case's worker processes."""

    case: Case
    cells: dict[int, tuple[int, ...]]
    """Layers per cell, by the number of cells."""
    plans: dict[str, tuple[tuple[int, ...], ScheduleConfig]]
    """Cells and schedule of the planned entrants, by name."""
    truth: Path
    """The gradients of one process."""
    log: Path


@dataclass(frozen=True)
class Observation:
    """What one worker found when it built an entrant and ran its first step."""

    differences: dict[str, float]
    """Largest difference from the reference gradient for each parameter it holds, relative to its largest value."""
    peak: int | None
    """Peak bytes that the step allocated."""


class Contest:
    """A context with the workers of all entrants."""

    def __init__(self, inputs: BenchInputs, entrants: Sequence[Entrant]) -> None:
        """Entrants that compute get processes of their own, the others share theirs."""
        self._inputs = inputs
        self._groups = [[one] for one in entrants] if inputs.case.own_processes else [list(entrants)]
        self._workers = inputs.case.work.stages * inputs.case.work.replicas
        self._turns = [0] * len(self._groups)
        self._ended = threading.Event()
        self._running: list[Future[list[Any]]] = []
        self.observed: dict[str, list[Observation]] = {}
        """What each worker found, by entrant."""

    def __enter__(self) -> Self:
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._threads = ThreadPoolExecutor(len(self._groups), "contest")
        try:
            for at, group in enumerate(self._groups):
                self._running.append(self._threads.submit(self._run, at, group))
                built = self._answers(at, f"{at}/built", TURN_S * len(group))  # one after another: they measure memory
                for entrant, observations in zip(group, zip(*built, strict=True), strict=True):
                    self.observed[entrant.name] = [Observation(**each) for each in observations]
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def turn(self, name: str) -> tuple[float, ...]:
        """Runs a turn of an entrant; returns the seconds of each step on the slowest worker."""
        at, place = next(
            (at, place)
            for at, group in enumerate(self._groups)
            for place, entrant in enumerate(group)
            if entrant.name == name
        )
        key = turn_key(at, self._turns[at])
        self._turns[at] += 1
        self._store.set(key, str(place))
        return tuple(max(of_step) for of_step in zip(*self._answers(at, key, TURN_S), strict=True))

    def _run(self, at: int, group: Sequence[Entrant]) -> list[Any]:
        from launch.benchmarks.worker import serve

        return run_processes(
            serve, self._workers, self._inputs, group, self._store.port, at, deadline_s=DEADLINE_S,
            should_stop=self._ended.is_set,
        )  # fmt: skip

    def _answers(self, at: int, key: str, limit_s: float) -> list[Any]:
        """Returns each worker's answer. Raises what ended the workers, or WorkerError after ``limit_s``."""
        keys = [f"{key}/{rank}" for rank in range(self._workers)]
        until = time.monotonic() + limit_s
        while True:
            try:
                self._store.wait(keys, timedelta(seconds=_POLL_S))
                return [json.loads(self._store.get(each)) for each in keys]
            except DistStoreError:
                if self._running[at].done():
                    self._running[at].result()
                    raise WorkerError("the workers of a benchmark ended before their turn") from None
                if time.monotonic() > until:
                    raise WorkerError(f"the workers of a benchmark did not answer in {limit_s:.0f} s") from None

    def _end(self) -> None:
        """Lets the workers end; ends those that do not, such as one in the middle of a turn."""
        for at, turn in enumerate(self._turns):
            self._store.set(turn_key(at, turn), END)
        until = time.monotonic() + 10
        while time.monotonic() < until and not all(future.done() for future in self._running):
            time.sleep(0.05)
        self._ended.set()
        self._threads.shutdown()


def turn_key(group: int, turn: int) -> str:
    """Returns the key under which the workers of a group find what to run in a turn: an entrant's place, or ``END``."""
    return f"{group}/turn/{turn}"
