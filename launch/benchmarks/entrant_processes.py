"""The worker processes of a benchmark case, which stay alive and run one entrant's turn at a time.

    parent          asks for a turn of B -----------------------> has the seconds of each step
    A's processes   wait, without computing
    B's processes   wait --> barrier, step, barrier, ... --> wait

Why not start processes for each turn: that takes longer than the turn. Why not one set of processes for all: with
twenty other entrants in the same memory, an entrant that computes is up to a tenth slower (measured).
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from experiments.benchmark.cases import Case
from experiments.benchmark.peers.peer import Entrant
from launch.backends.network_interface import rendezvous_store
from launch.backends.processes import run_processes
from suite.errors import WorkerError
from suite.pipeline.schedule.config import ScheduleConfig

DEADLINE_S = 3600.0
"""Longest life of a case's processes."""

TURN_S = 600.0
"""Longest turn, and longest time to build one entrant."""

_POLL_S = 0.05
"""How often the parent asks for answers, and whether the workers still live."""

END = "end"


@dataclass(frozen=True)
class BenchInputs:
    """The inputs of a case's worker processes."""

    case: Case
    cells: dict[int, tuple[int, ...]]
    """Layers per cell, by the number of cells."""
    plans: dict[str, tuple[tuple[int, ...], ScheduleConfig]]
    """Cells and schedule of the planned entrants, by name."""
    truths: dict[int, Path]
    """The gradients of one process, by its number of threads: sums of another order can turn a ReLU on or off."""
    log: Path


@dataclass(frozen=True)
class Observation:
    """What one worker found when it built an entrant and ran its first step."""

    differences: dict[str, float]
    """Largest difference from the reference gradient for each parameter it holds, relative to its largest value."""
    peak: int
    """Peak bytes that the step allocated."""


class EntrantProcesses:
    """A context with the workers of all entrants."""

    def __init__(self, inputs: BenchInputs, entrants: Sequence[Entrant]) -> None:
        """Entrants that compute get processes of their own, the others share theirs."""
        self._inputs = inputs
        self._groups = [[one] for one in entrants] if inputs.case.own_processes else [list(entrants)]
        self._workers = inputs.case.work.stages * inputs.case.work.replicas
        self._next_turn = [0] * len(self._groups)
        self._ended = threading.Event()
        self._running: list[Future[list[Any]]] = []
        self.observed: dict[str, list[Observation]] = {}
        """What each worker found, by entrant."""

    def __enter__(self) -> Self:
        self._store = rendezvous_store("127.0.0.1")
        self._threads = ThreadPoolExecutor(len(self._groups), "entrants")
        try:
            for index, group in enumerate(self._groups):
                self._running.append(self._threads.submit(self._run, index, group))
                # one group after another: each has the machine to itself in its first step
                built = self._answers(index, f"{index}/built", TURN_S * len(group))
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
        index, place = next(
            (index, place)
            for index, group in enumerate(self._groups)
            for place, entrant in enumerate(group)
            if entrant.name == name
        )
        key = turn_key(index, self._next_turn[index])
        self._next_turn[index] += 1
        self._store.set(key, str(place))
        return tuple(max(of_step) for of_step in zip(*self._answers(index, key, TURN_S), strict=True))

    def _run(self, index: int, group: Sequence[Entrant]) -> list[Any]:
        from launch.benchmarks.worker import serve

        return run_processes(
            serve, self._workers, self._inputs, group, self._store.port, index, deadline_s=DEADLINE_S,
            should_stop=self._ended.is_set,
        )  # fmt: skip

    def _answers(self, index: int, key: str, deadline_s: float) -> list[Any]:
        """Returns each worker's answer. Raises what ended the workers, or WorkerError after ``deadline_s``."""
        keys = [f"{key}/{rank}" for rank in range(self._workers)]
        until = time.monotonic() + deadline_s
        while not self._store.check(keys):  # a wait with a time limit would print a warning each time
            if self._running[index].done():
                self._running[index].result()
                raise WorkerError("the workers of a benchmark ended before their turn")
            if time.monotonic() > until:
                raise WorkerError(f"the workers of a benchmark did not answer in {deadline_s:.0f} s")
            time.sleep(_POLL_S)
        return [json.loads(self._store.get(each)) for each in keys]

    def _end(self) -> None:
        """Tells the workers to end; kills those that do not, such as one in the middle of a turn."""
        for index, turn in enumerate(self._next_turn):
            self._store.set(turn_key(index, turn), END)
        until = time.monotonic() + 10
        while time.monotonic() < until and not all(future.done() for future in self._running):
            time.sleep(0.05)
        self._ended.set()
        self._threads.shutdown()


def turn_key(group: int, turn: int) -> str:
    """Returns the key under which the workers of a group find what to run in a turn: an entrant's place, or ``END``."""
    return f"{group}/turn/{turn}"
