"""The worker processes of a benchmark case, which stay alive and run one entrant's turn at a time.

    A's processes   build, first step   wait, without computing   steps   wait ...
    B's processes                       build, first step         wait    steps ...

Why not start processes for each turn: that takes longer than the turn. Why not one set of processes for all: with
twenty other entrants in the same memory, an entrant that computes is up to a tenth slower (measured).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from rich.console import Console

from experiments.benchmark.peers.peer import Entrant
from launch.backends.network_interface import rendezvous_store
from launch.backends.processes import run_processes
from launch.benchmarks.worker import DEADLINE_S, BenchInputs, Observation, serve

_POLL_S = 0.05
"""How often the parent asks whose turn it is, and whether the workers still live."""


def run_turns(inputs: BenchInputs, entrants: Sequence[Entrant], console: Console) -> dict[str, list[Observation]]:
    """Runs all turns; returns what each worker found, by entrant. Entrants that compute get processes of their own, the
    others share theirs. Raises what ended the workers."""
    case = inputs.case
    groups = [[one] for one in entrants] if case.own_processes else [list(entrants)]
    workers = case.work.stages * case.work.replicas
    store = rendezvous_store("127.0.0.1")
    store.set("0", "")
    ended = threading.Event()
    running: list[Future[list[Any]]] = []
    with ThreadPoolExecutor(len(groups), "entrants") as threads:
        try:
            for number in range(len(inputs.turns)):
                if number < len(groups):  # after the turn before: each has the machine to itself in its first step
                    running.append(
                        threads.submit(
                            run_processes, serve, workers, inputs, groups[number], store.port, deadline_s=DEADLINE_S,
                            should_stop=ended.is_set,
                        )
                    )  # fmt: skip
                while not store.check([str(number + 1)]):  # a wait with a time limit would print a warning each time
                    for future in running:
                        if future.done():
                            future.result()
                    time.sleep(_POLL_S)
                if number >= len(entrants) and (number + 1) % len(entrants) == 0:
                    console.print(f"{case.title}: round {(number + 1) // len(entrants) - 1} of {case.rounds}")
            found = [future.result() for future in running]
        except BaseException:
            ended.set()
            raise
    return {
        entrant.name: [of_worker[entrant.name] for of_worker in of_group]
        for group, of_group in zip(groups, found, strict=True)
        for entrant in group
    }
