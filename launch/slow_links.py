"""Measures sleeping pipelines whose stages stand on hosts of their own, over links with delay and bandwidth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch.distributed as dist
from rich.console import Console

from experiments.slow_links import Series, named
from experiments.throughput import SleepingWork
from launch.hosts import Hosts, in_host
from launch.measure import Measured, Steps, measure_layers, measure_link, measure_steps, meet
from launch.spawn import run_processes
from suite.pipeline.costs import LayerCost
from suite.pipeline.recipe import Recipe
from suite.pipeline.simulate import Link

ROUNDS = 3
"""Of all works in turn, so that what the machine does meanwhile strikes none of them alone, and no median."""

STEPS = 1
"""Counted in each round."""


def over_hosts(console: Console, folder: Path) -> Callable[[Sequence[SleepingWork], Link], Series]:
    """Returns what measures works over a link; what libraries print goes below ``folder``."""

    known: dict[SleepingWork, tuple[LayerCost, ...]] = {}

    def measure(works: Sequence[SleepingWork], link: Link) -> Series:
        folder.mkdir(parents=True, exist_ok=True)
        with Hosts(max(work.pipeline.stages for work in works), link) as hosts:
            console.print(f"{named(link)}: {len(hosts.names)} hosts, their links made of {hosts.how}")
            ways: list[Link] = run_processes(in_host, 2, hosts.names[:2], _hop, works[0].message_bytes)
            for work in works:
                known[work] = known.get(work) or _alone(work, folder)
            steps: list[list[float]] = [[] for _ in works]
            for _ in range(ROUNDS):
                for work, seconds in zip(works, steps, strict=True):
                    seconds += _measured(hosts, work)
                    shown = ", ".join(f"{one:.3f}" for one in seconds[-STEPS:])
                    console.print(f"K = {work.pipeline.stages}, M = {work.micro_batches}: {shown} s a step")
            return Series(tuple(map(tuple, steps)), tuple(known[work] for work in works), ways[0], hosts.how)

    return measure


def _alone(work: SleepingWork, folder: Path) -> tuple[LayerCost, ...]:
    found: list[Measured] = run_processes(measure_layers, 1, work, 1, False, folder / "measuring.log")
    return found[0].costs


def _measured(hosts: Hosts, work: SleepingWork) -> list[float]:
    stages = work.pipeline.stages
    steps: list[Steps] = run_processes(
        in_host, stages, hosts.names[:stages], measure_steps, work, (1,) * stages, Recipe.of(work.pipeline), STEPS, 1,
        False,
    )  # fmt: skip
    return [max(column) for column in zip(*(one.seconds for one in steps), strict=True)]


def _hop(rank: int, world: int, rendezvous: str, size: int) -> Link:
    """Returns the link between two hosts."""
    link = measure_link(rank, size, meet(rank, world, rendezvous, threads=1))
    dist.barrier()
    dist.destroy_process_group()
    return link
