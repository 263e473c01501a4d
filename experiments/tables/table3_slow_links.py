"""Table 3's situation over links that are really slow: what delay and bandwidth do to a step, measured and simulated.

Each stage is a sleeping layer on a host of its own, and the links between the hosts have the delay and bandwidth of
``LINKS`` (``launch.benchmarks.netns_hosts``). One clock serves every K: a stage of K = 8 sleeps ``SHORTEST_S`` in a
forward, of K = 4 twice and of K = 2 four times as long, and messages are the same at every K, because the mini-batch
is.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from experiments.report.paper import printed
from experiments.report.table import Table, Value
from experiments.tables.table2_transformer import SleepingWork, cell_seconds, simulated_step
from suite.pipeline.planning.costs import LayerCost
from suite.pipeline.planning.simulate import Link

LINKS = (Link(0.005, 12.5e6), Link(0.010, 5e6))
"""100 Mbit/s, over which a message takes less than a forward at K = 8, and 40 Mbit/s, over which it takes more."""

SHORTEST_S = 0.015
"""A forward's sleep at the largest K."""

THINNED = 10
"""Messages are that much smaller than the model's on this clock, and so are links than those they stand for: what all
hosts send together is to be little for two cores."""


@dataclass(frozen=True)
class Series:
    """What was measured over one link."""

    steps: tuple[tuple[float, ...], ...]
    """Seconds of each work's steps."""
    alone: tuple[tuple[LayerCost, ...], ...]
    """Each work's stages (F, R, B), measured alone."""
    link: Link
    """As two hosts measured it, message by message."""
    how: str
    """What the links were made of."""


def works() -> list[SleepingWork]:
    """Returns Transformer-24 cut into equal stages on P100s, for each K of Table 3."""
    numbers = printed("table3.transformer")
    cases = {k: cell_seconds(numbers["layers"], "P100", k, numbers["M"], cut=False) for k in numbers["K"]}
    seconds, _, slowed = cases[max(cases)]
    clock = slowed * SHORTEST_S / seconds[0][0]
    return [
        SleepingWork(
            tuple((forward * clock / slowed, backward * clock / slowed) for forward, backward in seconds),
            numbers["M"],
            int(message * clock / slowed / THINNED),
        )
        for seconds, message, slowed in cases.values()
    ]


def slow_links_table(measure: Callable[[Sequence[SleepingWork], Link], Series]) -> Table:
    """Returns the measured step over each link beside the simulated one, over the same link and over a free one."""
    numbers = printed("table3.transformer")
    rows: list[list[Value]] = []
    notes = [
        f"One stage a host (a network namespace); F at K = 8 is {SHORTEST_S * 1e3:.0f} ms, at K = 4 twice and at "
        "K = 2 four times that. Speeds are over K = 2. Spread = (slowest - fastest) / median of the steps.",
        "Simulated from the stages' F, R and B as measured alone. The measured step ends when all stages know that all "
        "are done, which the simulated one leaves out.",
    ]
    for link in LINKS:
        each = works()
        found = measure(each, link)
        table = [
            _steps(work, alone, steps, link, found.link)
            for work, alone, steps in zip(each, found.alone, found.steps, strict=True)
        ]
        for work, steps, row, paper in zip(each, found.steps, table, numbers["speed"], strict=True):
            speeds = [first / own for first, own in zip(table[0], row, strict=True)]
            rows.append(
                [
                    named(link), work.pipeline.stages, work.micro_batches, work.message_bytes / 1e3,
                    row.measured, (max(steps) - min(steps)) / row.measured, row.simulated, row.over_measured,
                    row.measured / row.simulated, row.free, *speeds[:2], speeds[3], paper,
                ]
            )  # fmt: skip
        notes.append(
            f"{named(link)}: made of {found.how}; two hosts measured {named(found.link)} in messages of that size."
        )
    headings = (
        "link", "K", "M", "KB a message", "step s (measured)", "spread", "step s (simulated)",
        "step s (simulated, link as measured)", "measured / simulated", "step s (simulated, free link)",
        "speed (measured)", "speed (simulated)", "speed (simulated, free link)", "speed (paper)",
    )  # fmt: skip
    title = "Table 3's situation over slow links, Transformer-24, M = 32"
    return Table("slow-links", title, headings, rows, [*notes, numbers["note"]])


class _Row(NamedTuple):
    """Seconds of a step, come by in four ways."""

    measured: float
    simulated: float
    over_measured: float
    free: float


def _steps(
    work: SleepingWork, alone: Sequence[LayerCost], steps: Sequence[float], link: Link, as_measured: Link
) -> _Row:
    def simulated(over: Link) -> float:
        return simulated_step(alone, work.micro_batches, work.message_bytes, over)

    return _Row(statistics.median(steps), simulated(link), simulated(as_measured), simulated(Link()))


def named(link: Link) -> str:
    """Returns a link as people name it."""
    return f"{link.bytes_per_s * 8e-6:.4g} Mbit/s, {link.latency_s * 1e3:.3g} ms"
