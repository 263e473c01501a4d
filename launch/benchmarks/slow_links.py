"""Measures synthetic pipelines whose stages run on separate hosts, over links with delay and bandwidth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch.distributed as dist
from rich.console import Console

from experiments.tables.table2_transformer import SleepingWork
from experiments.tables.table3_slow_links import LinkMeasurement, link_name
from launch.backends.processes import run_processes
from launch.benchmarks.netns_hosts import Hosts, in_host
from launch.worker.distributed import init_process_group
from launch.worker.measure import LayerMeasurements, Steps, measure_layers, measure_link, measure_steps, slowest_s
from suite.pipeline.planning.costs import LayerCost
from suite.pipeline.planning.simulate import Link
from suite.pipeline.schedule.config import ScheduleConfig

ROUNDS = 3
"""Rounds over all works, so that other load on the machine affects all of them alike and no median."""

STEPS = 1
"""Timed steps of each round."""


def over_hosts(console: Console, folder: Path) -> Callable[[Sequence[SleepingWork], Link], LinkMeasurement]:
    """Returns a function that measures works over a link; the output of libraries goes to ``folder``."""

    costs: dict[SleepingWork, tuple[LayerCost, ...]] = {}

    def measure(works: Sequence[SleepingWork], link: Link) -> LinkMeasurement:
        folder.mkdir(parents=True, exist_ok=True)
        with Hosts(max(work.pipeline.stages for work in works), link) as hosts:
            console.print(f"{link_name(link)}: {len(hosts.names)} hosts")
            measured_links: list[Link] = run_processes(
                in_host, 2, hosts.names[:2], _measure_link_once, works[0].message_bytes
            )
            for work in works:
                costs[work] = costs.get(work) or layer_costs(work, folder)
            steps: list[list[float]] = [[] for _ in works]
            for _ in range(ROUNDS):
                for work, seconds in zip(works, steps, strict=True):
                    seconds += _step_seconds(hosts, work)
                    shown = ", ".join(f"{one:.3f}" for one in seconds[-STEPS:])
                    console.print(f"K = {work.pipeline.stages}, M = {work.micro_batches}: {shown} s a step")
            stage_costs = tuple(costs[work] for work in works)
            return LinkMeasurement(tuple(map(tuple, steps)), stage_costs, measured_links[0])

    return measure


def layer_costs(work: SleepingWork, folder: Path) -> tuple[LayerCost, ...]:
    """Returns the costs of a work's layers, measured in one process; the output of libraries goes to ``folder``."""
    found: list[LayerMeasurements] = run_processes(measure_layers, 1, work, 1, False, folder / "measuring.log")
    return found[0].costs


def _step_seconds(hosts: Hosts, work: SleepingWork) -> list[float]:
    stages = work.pipeline.stages
    steps: list[Steps] = run_processes(
        in_host, stages, hosts.names[:stages], measure_steps, work, (1,) * stages,
        ScheduleConfig.from_settings(work.pipeline), STEPS, False,
    )  # fmt: skip
    return slowest_s(steps)


def _measure_link_once(rank: int, world: int, rendezvous: str, size: int) -> Link:
    """Returns the link between two hosts."""
    link = measure_link(rank, size, init_process_group(rank, world, rendezvous, threads=1))
    dist.barrier()
    dist.destroy_process_group()
    return link
