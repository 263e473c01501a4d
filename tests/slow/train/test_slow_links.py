"""Table 3 over slow links: a step of sleeping stages on hosts of their own, measured beside simulated.

All K have the same time scale: in a forward a stage of K = 8 sleeps ``SHORTEST_FORWARD_S``, one of K = 4 twice and one
of K = 2 four times as long. Messages are the same at every K, because the mini-batch is. Needs root. On a machine
without other work the test prints docs/results/slow-links.md:

    .venv/bin/python -m pytest -n 0 -s --timeout 1800 tests/slow/train/test_slow_links.py
"""

import os
import statistics

import pytest
import torch.distributed as dist

from experiments.report.paper import paper_numbers
from experiments.report.table import Table, relative_spread
from experiments.tables.table2 import SleepingWork, cell_seconds, simulated_step
from launch.backends.processes import run_processes
from launch.worker.distributed import init_process_group
from launch.worker.measure import MeasuredPipeline, measure_layers, measure_link, measure_steps, slowest_s
from suite.pipeline.planning.simulate import Link
from suite.pipeline.schedule.config import ScheduleConfig
from tests.hosts.netns_hosts import Hosts, in_host
from tests.quick_measuring import estimates

LINKS = (Link(0.005, 12.5e6), Link(0.010, 5e6))
"""100 Mbit/s, over which a message takes less than a forward at K = 8, and 40 Mbit/s, over which it takes more."""

SHORTEST_FORWARD_S = 0.015
MESSAGE_DIVISOR = 10
"""Messages and bandwidths are divided by this, so that the traffic of all hosts takes little of two cores' time."""

ROUNDS = 3
"""Rounds over all pipelines, so that other load on the machine affects all of them alike and no median."""

HEADINGS = (
    "link", "K", "M", "KB per message", "step s (measured)", "spread", "step s (simulated)",
    "step s (simulated, link as measured)", "measured / simulated", "step s (simulated, free link)",
    "speed (measured)", "speed (simulated)", "speed (simulated, free link)", "speed (paper)",
)  # fmt: skip
NOTES = [
    f"One stage per host (a network namespace); F at K = 8 is {SHORTEST_FORWARD_S * 1e3:.0f} ms, at K = 4 twice "
    "and at K = 2 four times that. Speeds are over K = 2. Spread = (slowest - fastest) / median of the steps.",
    "Simulated from the stages' F, R and B, measured alone. The measured step ends when all stages know that all "
    "are done; the simulation leaves this out.",
]


def pipelines():
    """Returns Transformer-24 in equal stages on P100s, for each K of Table 3."""
    numbers = paper_numbers("table3.transformer")
    cases = [cell_seconds(numbers["layers"], "P100", k, numbers["M"], cut=False) for k in numbers["K"]]
    seconds, _, slowed = cases[-1]
    clock = slowed * SHORTEST_FORWARD_S / seconds[0][0]
    return [
        SleepingWork(
            tuple((forward * clock / slowed, backward * clock / slowed) for forward, backward in seconds),
            numbers["M"],
            int(message * clock / slowed / MESSAGE_DIVISOR),
        )
        for seconds, message, slowed in cases
    ]


def link_between_hosts(rank, world, rendezvous, size):
    link = measure_link(rank, size, init_process_group(rank, world, rendezvous, threads=1))
    dist.barrier()
    dist.destroy_process_group()
    return link


def steps_over(link, works):
    """Returns the seconds of each pipeline's steps, and the link as measured between two hosts."""
    steps = [[] for _ in works]
    with Hosts(max(work.pipeline.stages for work in works), link) as hosts:
        found = run_processes(in_host, 2, hosts.names[:2], link_between_hosts, works[0].message_bytes)
        for _ in range(ROUNDS):
            for work, seconds in zip(works, steps, strict=True):
                stages = work.pipeline.stages
                schedule = ScheduleConfig.from_settings(work.pipeline)
                names, cells = hosts.names[:stages], (1,) * stages
                run = MeasuredPipeline(work, cells, schedule)
                workers = run_processes(in_host, stages, names, measure_steps, run, 1, False)
                seconds += slowest_s(workers)
    return steps, found[0]


def measured_costs(work, log):
    return run_processes(measure_layers, 1, work, estimates(work), 1, False, log)[0].costs


def link_name(link):
    return f"{link.bytes_per_s * 8e-6:.4g} Mbit/s, {link.latency_s * 1e3:.3g} ms"


@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
def test_a_step_over_a_slow_link_takes_what_the_simulation_says(tmp_path):
    numbers, works, rows, notes, ratios = paper_numbers("table3.transformer"), pipelines(), [], list(NOTES), []
    costs = [measured_costs(work, tmp_path / "measuring.log") for work in works]
    for link in LINKS:
        steps, found = steps_over(link, works)
        times = [
            (
                statistics.median(seconds),
                *(simulated_step(c, work.micro_batches, work.message_bytes, each) for each in (link, found, Link())),
            )
            for work, c, seconds in zip(works, costs, steps, strict=True)
        ]
        for work, seconds, own, paper in zip(works, steps, times, numbers["speed"], strict=True):
            measured, simulated, over_found, free = own
            speeds = [first / each for first, each in zip(times[0], own, strict=True)]
            ratios.append(min(seconds) / simulated)  # other work on the machine only adds time
            rows.append([
                link_name(link), work.pipeline.stages, work.micro_batches, work.message_bytes / 1e3, measured,
                relative_spread(seconds), simulated, over_found, measured / simulated, free, *speeds[:2], speeds[3],
                paper,
            ])  # fmt: skip
        notes.append(
            f"{link_name(link)}: a link in user space; two hosts measured {link_name(found)} in messages of that size."
        )
    title = "Table 3 over slow links, Transformer-24, M = 32"
    print(Table("slow-links", title, HEADINGS, rows, [*notes, numbers["note"]]).markdown())
    assert all(0.95 < ratio < 1.25 for ratio in ratios), ratios
    assert rows[5][6] > 1.3 * rows[5][9], "over 40 Mbit/s the messages count at K = 8"
