"""``make bench NAME=feed``: how fast mini-batches are made, and what the thread that launches kernels loses by it.

    main thread   launch launch launch launch ...     tiny operations, counted
    beside it     nothing, a thread, one feed process, or several

A turn makes a few mini-batches of the paper's size. A round gives each way a turn, and the next round runs backwards.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import torch
from rich.console import Console

from experiments.base.experiment import Experiment
from experiments.benchmark.cases import turn_order
from experiments.benchmark.ratio import Ratio, ratio_of
from experiments.registry import find
from experiments.report.table import Table, Value
from experiments.translation.experiment import TranslationExperiment
from launch.runs.store import CACHE
from launch.worker.devices import cpu_model
from launch.worker.feed_processes import MAX_PROCESSES, FeedProcesses
from suite.cgroups import cpu_limit
from suite.data.text.prepare import folder_of, prepare
from suite.pipeline.model.microbatch import ReplicaBatch
from suite.pipeline.model.topology import RankCoord

SETTINGS = "text.corpus=django text.vocabulary=8000"
"""Text that needs no network; a mini-batch has each of its 50,000 pairs several times."""

ROUNDS, BATCHES = 8, 4
"""Rounds, and the mini-batches that a turn times."""

NEEDED_S = 4.3 / 4
"""Seconds for a mini-batch: a quarter of the planned step of t128_6b on 128 H100."""

NOTHING, THREAD = "nothing", "a thread"

Turn = tuple[float, float, float]
"""Tokens, launches and seconds."""


def feed_table(console: Console, settings: str = "", rounds: int = ROUNDS) -> Table:
    """Measures, and returns the table: the mini-batches that the first stage of a replica of t128_6b gets."""
    experiment = find("t128_6b").with_settings(SETTINGS).with_settings(settings)
    assert isinstance(experiment, TranslationExperiment)
    prepare(experiment.text, CACHE, console.print)
    data = folder_of(experiment.text, CACHE)
    torch.set_num_threads(1)
    several = max(2, min(MAX_PROCESSES, cpu_limit()))
    ways = {NOTHING: 0, THREAD: 0, "1 feed process": 1, f"{several} feed processes": several}
    turns: dict[str, list[Turn]] = {way: [] for way in ways}
    for number in range(rounds):
        for way in turn_order(ways, number):
            console.print(f"feed: round {number + 1} of {rounds}, {way}")
            turns[way].append(_turn(number, way, ways[way], experiment, data))
    return _table(turns, experiment)


def _turn(number: int, way: str, processes: int, experiment: Experiment, data: Path) -> Turn:
    """Counts launches while mini-batches are made; those before and after the counted ones keep all processes busy."""
    if way == NOTHING:
        return _launch_beside(_wait)
    coord = RankCoord(0, experiment.pipeline.stages, experiment.pipeline.replicas)
    steps = range(100 * number, 100 * number + BATCHES + 2 * max(1, processes))
    make: Callable[[int], ReplicaBatch | None] = experiment.data_source(data, coord).batch
    if processes:
        make = FeedProcesses(experiment, data, coord, steps, processes)
    left = iter(steps)
    for step in islice(left, max(1, processes)):
        make(step)
    turn = _launch_beside(lambda: sum(batch.divisor for batch in map(make, islice(left, BATCHES)) if batch))
    for step in left:
        make(step)
    return turn


def _wait() -> float:
    time.sleep(NEEDED_S)
    return 0.0


def _launch_beside(work: Callable[[], float]) -> Turn:
    """Runs ``work``, which returns the tokens that it made, in a thread, and tiny operations in this one."""
    number, launches, begin = torch.zeros(1), 0, time.perf_counter()
    with ThreadPoolExecutor(1) as thread:
        made = thread.submit(work)
        while not made.done():
            for _ in range(500):
                number.add_(1)
            launches += 500
        return made.result(), launches, time.perf_counter() - begin


def _table(turns: Mapping[str, Sequence[Turn]], experiment: TranslationExperiment) -> Table:
    batch_tokens, pipeline = experiment.train.batch_tokens, experiment.pipeline
    rows: list[list[Value]] = []
    for way, by_round in turns.items():
        tokens, launches, seconds = zip(*by_round, strict=True)
        made = ratio_of(tokens, seconds) if way != NOTHING else None
        rows.append(
            [way, _per_s(made), batch_tokens / made.median if made else None, _per_s(ratio_of(launches, seconds))]
        )
    notes = [
        f"Measured: the share of a first stage in mini-batches of {batch_tokens:,} tokens, R = {pipeline.replicas}, "
        f"M = {pipeline.micro_batches}. {cpu_limit()} cores of {cpu_model()}. Median and 95% interval of "
        f"{len(by_round)} rounds.",
        f"Needed: {batch_tokens / NEEDED_S:,.0f} tokens/s: a mini-batch in a quarter of a step of {4 * NEEDED_S} s.",
    ]
    headings = ("beside the launches", "tokens/s", "seconds a mini-batch", "launches/s")
    return Table("bench-feed", "Mini-batches and launches", headings, rows, notes)


def _per_s(rate: Ratio | None) -> str | None:
    return f"{rate.median:,.0f} [{rate.low:,.0f}, {rate.high:,.0f}]" if rate is not None else None
