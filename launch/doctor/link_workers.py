"""Who measures the links: workers that Ray places as it places a run's, and two plain processes beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from launch.cluster.network import use_interface_of
from launch.doctor import links
from launch.doctor.finding import Finding, fault, warning
from launch.doctor.nodes import Node
from launch.doctor.ray_nodes import collect, pinned
from suite.errors import SuiteError
from suite.pipeline.simulate import Link

PLACE_S = 60.0
"""Seconds for a worker to be placed and to import torch, beside others that do the same."""

BEGIN_S, PAIR_S = 60.0, 30.0
"""Seconds for the workers to meet and reduce, and for each pair: gloo and NCCL make a connection with each first
message."""

ALL_PAIRS = 8
"""Up to so many nodes every pair is measured; of more each with the next, so that the time grows with the nodes."""


class Worker:
    """One process that measures, with one device."""

    def __init__(self, address: str) -> None:
        self._address = address

    def ready(self) -> int:
        """Opens a store, so that its port stays this worker's, and returns the port."""
        use_interface_of(self._address)
        self._store = links.open_store(self._address)
        return int(self._store.port)

    def measure(self, rank: int, world: int, host: str, port: int, task: links.Task, use_gpu: bool) -> links.Told:
        """Measures with the others, who meet in the first one's store."""
        store = self._store if rank == 0 else links.join_store(host, port)
        return links.measure(rank, world, store, task, use_gpu)


@dataclass(frozen=True)
class Measured:
    """Links by the names of their nodes; within one node both names are the same."""

    pairs: dict[tuple[str, str], Link]
    reduced: Link | None
    reducers: int = 0


def seats_of(nodes: Sequence[Node]) -> tuple[list[Node], bool]:
    """Returns the node of each worker, two on a node that has devices for two, and whether devices are GPUs."""
    use_gpu = any(node.gpus for node in nodes)
    return [node for node in nodes for _ in range(min(2, (node.gpus if use_gpu else node.cpus) or 0))], use_gpu


def by_ray(nodes: Sequence[Node], say: Callable[[str], None]) -> tuple[Measured | None, list[Finding]]:
    """Measures between workers on a cluster's nodes; a worker that finds no place is told and left out."""
    import ray

    seats, use_gpu = seats_of(nodes)
    what = "GPU" if use_gpu else "CPU"
    needs: dict[str, Any] = {"num_gpus": 1, "num_cpus": 0} if use_gpu else {"num_cpus": 1}
    actors = [ray.remote(Worker).options(**pinned(node), **needs).remote(node.address) for node in seats]
    try:
        ready, silent = collect({at: actor.ready.remote() for at, actor in enumerate(actors)}, PLACE_S)  # type: ignore[attr-defined]
        found = _unplaced(seats, silent, what)
        placed = sorted(ready)
        there = [seats[at] for at in placed]
        task, named = plan(there)
        if not task.pairs:
            return None, found
        say(f"measuring {len(task.pairs)} links between {len(there)} workers")
        told, mute = collect(
            {
                rank: actors[at].measure.remote(rank, len(there), there[0].address, ready[placed[0]], task, use_gpu)  # type: ignore[attr-defined]
                for rank, at in enumerate(placed)
            },
            BEGIN_S + PAIR_S * len(task.pairs),
        )
        if mute:
            rank, why = next(iter(mute.items()))
            return None, [*found, _unmeasured(there[rank].name, why)]
        pairs = {named[pair]: link for one in told.values() for pair, link in one.pairs.items()}
        return Measured(pairs, told[task.reduced[0]].reduced, len(task.reduced)), found
    finally:
        for actor in actors:
            ray.kill(actor)  # type: ignore[arg-type]


def _unplaced(seats: Sequence[Node], silent: dict[int, str], what: str) -> list[Finding]:
    """Returns a line for each node where not every worker found a place."""
    missing = {seats[at]: why for at, why in silent.items()}
    remedy = "another run may hold them (ray status): wait for it, stop it, or add nodes"
    found = []
    for node, why in missing.items():
        asked, failed = seats.count(node), sum(seats[at] == node for at in silent)
        has = node.gpus if what == "GPU" else node.cpus
        told = f"{node.name} has {has} {what}s, and of {asked} workers with one each {asked - failed} found a place"
        found.append(fault("placement", f"{told}: {why}", remedy))
    return found


def _unmeasured(name: str, why: str) -> Finding:
    remedy = "see ports above; or set GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME to the interface of its address"
    return fault("links", f"the links could not be measured: {name}: {why}", remedy)


def plan(there: Sequence[Node]) -> tuple[links.Task, dict[tuple[int, int], tuple[str, str]]]:
    """Returns what workers on these nodes measure, and the names of each pair."""
    first: dict[Node, int] = {}
    second: dict[Node, int] = {}
    for rank, node in enumerate(there):
        (second if node in first else first).setdefault(node, rank)
    nodes = list(first)
    within = [(first[node], second[node]) for node in nodes if node in second]
    if len(nodes) <= ALL_PAIRS:
        between = [(first[a], first[b]) for at, a in enumerate(nodes) for b in nodes[at + 1 :]]
    else:
        between = [(first[a], first[b]) for a, b in zip(nodes, [*nodes[1:], nodes[0]], strict=True)]
    pairs = (*within, *between)
    reduced = tuple(sorted(first.values())) if len(nodes) > 1 else tuple(range(len(there)))
    return links.Task(pairs, reduced), {pair: (there[pair[0]].name, there[pair[1]].name) for pair in pairs}


def alone(name: str) -> tuple[Measured | None, list[Finding]]:
    """Measures between two processes of this machine that Ray has not started."""
    import torch

    from launch.spawn import run_processes

    use_gpu = torch.cuda.device_count() >= 2
    task = links.Task(((0, 1),), (0, 1))
    try:
        told: list[links.Told] = run_processes(_alone, 2, task, use_gpu, deadline_s=BEGIN_S + PAIR_S)
    except (SuiteError, RuntimeError) as error:
        why = str(error).strip().splitlines()[-1]
        return None, [
            warning("links", f"two processes of {name} could not measure: {why}",
                    "see that the machine has a core and 2 GiB of memory free")
        ]  # fmt: skip
    return Measured({(name, name): told[0].pairs[0, 1]}, told[0].reduced, 2), []


def _alone(rank: int, world: int, rendezvous: str, task: links.Task, use_gpu: bool) -> links.Told:
    if use_gpu:
        import torch

        torch.cuda.set_device(rank)
    return links.measure(rank, world, rendezvous, task, use_gpu)
