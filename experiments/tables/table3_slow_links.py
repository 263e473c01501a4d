"""Table 3 over slow links: the effect of latency and bandwidth on a step, measured and simulated.

Each stage is a sleeping layer on its own host, and the links between the hosts have the latency and bandwidth of
``LINKS`` (``launch.benchmarks.netns_hosts``). All K have the same time scale: in a forward, a stage of K = 8 sleeps
``SHORTEST_FORWARD_S``, one of K = 4 twice and one of K = 2 four times as long. Messages are the same at every K,
because the mini-batch is.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from experiments.report.paper import paper_numbers
from experiments.report.table import Table, Value, relative_spread
from experiments.tables.table2_transformer import SleepingWork, cell_seconds, simulated_step
from suite.pipeline.planning.costs import LayerCost
from suite.pipeline.planning.simulate import Link

LINKS = (Link(0.005, 12.5e6), Link(0.010, 5e6))
"""100 Mbit/s, over which a message takes less than a forward at K = 8, and 40 Mbit/s, over which it takes more."""

SHORTEST_FORWARD_S = 0.015
"""Sleep of a forward at the largest K."""

MESSAGE_DIVISOR = 10
"""Messages and bandwidths are divided by this, so that the traffic of all hosts takes little of two cores' time."""


@dataclass(frozen=True)
class LinkMeasurement:
    """The measurements over one link."""

    steps: tuple[tuple[float, ...], ...]
    """Seconds of each pipeline's steps."""
    stage_costs: tuple[tuple[LayerCost, ...], ...]
    """F, R and B of each pipeline's stages, measured alone."""
    link: Link
    """The link as measured between two hosts, message by message."""


def pipelines() -> list[SleepingWork]:
    """Returns Transformer-24 in equal stages on P100s, for each K of Table 3."""
    numbers = paper_numbers("table3.transformer")
    cases = {k: cell_seconds(numbers["layers"], "P100", k, numbers["M"], cut=False) for k in numbers["K"]}
    seconds, _, slowed = cases[max(cases)]
    clock = slowed * SHORTEST_FORWARD_S / seconds[0][0]
    return [
        SleepingWork(
            tuple((forward * clock / slowed, backward * clock / slowed) for forward, backward in seconds),
            numbers["M"],
            int(message * clock / slowed / MESSAGE_DIVISOR),
        )
        for seconds, message, slowed in cases.values()
    ]


def slow_links_table(measure: Callable[[Sequence[SleepingWork], Link], LinkMeasurement]) -> Table:
    """Returns the measured step over each link beside the simulated one, over the same link and over a free one."""
    numbers = paper_numbers("table3.transformer")
    rows: list[list[Value]] = []
    notes = [
        f"One stage per host (a network namespace); F at K = 8 is {SHORTEST_FORWARD_S * 1e3:.0f} ms, at K = 4 twice "
        "and at K = 2 four times that. Speeds are over K = 2. Spread = (slowest - fastest) / median of the steps.",
        "Simulated from the stages' F, R and B, measured alone. The measured step ends when all stages know that all "
        "are done; the simulation leaves this out.",
    ]
    for link in LINKS:
        works = pipelines()
        measured = measure(works, link)
        times = [
            _step_times(work, costs, steps, link, measured.link)
            for work, costs, steps in zip(works, measured.stage_costs, measured.steps, strict=True)
        ]
        for work, steps, row, paper in zip(works, measured.steps, times, numbers["speed"], strict=True):
            speeds = [first / own for first, own in zip(times[0], row, strict=True)]
            rows.append(
                [
                    link_name(link), work.pipeline.stages, work.micro_batches, work.message_bytes / 1e3,
                    row.measured, relative_spread(steps), row.simulated, row.over_measured,
                    row.measured / row.simulated, row.free, *speeds[:2], speeds[3], paper,
                ]
            )  # fmt: skip
        notes.append(
            f"{link_name(link)}: a link in user space; two hosts measured {link_name(measured.link)} in messages of "
            "that size."
        )
    headings = (
        "link", "K", "M", "KB per message", "step s (measured)", "spread", "step s (simulated)",
        "step s (simulated, link as measured)", "measured / simulated", "step s (simulated, free link)",
        "speed (measured)", "speed (simulated)", "speed (simulated, free link)", "speed (paper)",
    )  # fmt: skip
    title = "Table 3 over slow links, Transformer-24, M = 32"
    return Table("slow-links", title, headings, rows, [*notes, numbers["note"]])


class _StepTimes(NamedTuple):
    """Seconds of a step: measured, and simulated over the nominal link, the measured link and a free link."""

    measured: float
    simulated: float
    over_measured: float
    free: float


def _step_times(
    work: SleepingWork, costs: Sequence[LayerCost], steps: Sequence[float], link: Link, measured_link: Link
) -> _StepTimes:
    simulated = [
        simulated_step(costs, work.micro_batches, work.message_bytes, each) for each in (link, measured_link, Link())
    ]
    return _StepTimes(statistics.median(steps), *simulated)


def link_name(link: Link) -> str:
    """Returns a link as text: bandwidth and latency."""
    return f"{link.bytes_per_s * 8e-6:.4g} Mbit/s, {link.latency_s * 1e3:.3g} ms"
