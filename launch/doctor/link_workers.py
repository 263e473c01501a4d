"""Who measures the links: workers that Ray places as it places a run's, and two plain processes beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from launch.doctor import links
from launch.doctor.finding import Finding, fault, warning
from launch.doctor.nodes import Node
from launch.doctor.ray_nodes import collect, pinned
from suite.errors import SuiteError
from suite.pipeline.simulate import Link

PLACE_S = 30.0
"""Seconds for a worker to be placed and to import torch; a run's own workers get longer, as all start at once."""

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
        """Returns a free port, once torch is there."""
        links.name_interface(self._address)
        return links.free_port(self._address)

    def measure(self, rank: int, world: int, rendezvous: str, task: links.Task, use_gpu: bool) -> links.Told:
        """Measures with the others."""
        return links.measure(rank, world, rendezvous, task, use_gpu)


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
        calls = {_seat(at, node): actors[at].ready.remote() for at, node in enumerate(seats)}  # type: ignore[attr-defined]
        ready, silent = collect(calls, PLACE_S)
        found = _unplaced(nodes, seats, silent, what)
        placed = [(at, node) for at, node in enumerate(seats) if _seat(at, node) in ready]
        there = [node for _, node in placed]
        task, named = plan(there)
        if not task.pairs:
            return None, found
        say(f"measuring {len(task.pairs)} links between {len(there)} workers")
        port = ready[_seat(*placed[0])]
        rendezvous = f"tcp://{there[0].address}:{port}"
        told, mute = collect(
            {
                _seat(at, node): actors[at].measure.remote(rank, len(there), rendezvous, task, use_gpu)  # type: ignore[attr-defined]
                for rank, (at, node) in enumerate(placed)
            },
            BEGIN_S + PAIR_S * len(task.pairs),
        )
        if mute:
            seat, why = next(iter(mute.items()))
            return None, [*found, _unmeasured(seat.name, why)]
        pairs = {named[pair]: link for one in told.values() for pair, link in one.pairs.items()}
        reduced = next((one.reduced for one in told.values() if one.reduced is not None), None)
        return Measured(pairs, reduced, len(task.reduced)), found
    finally:
        for actor in actors:
            ray.kill(actor)  # type: ignore[arg-type]


def _seat(at: int, node: Node) -> Node:
    """Returns what stands for one worker of a node."""
    return Node(node.name, node.address, f"{node.id}/{at}")


def _unplaced(nodes: Sequence[Node], seats: Sequence[Node], silent: dict[Node, str], what: str) -> list[Finding]:
    found = []
    for node in nodes:
        asked = sum(seat == node for seat in seats)
        missing = [why for seat, why in silent.items() if seat.id.rpartition("/")[0] == node.id]
        if missing:
            has = node.gpus if what == "GPU" else node.cpus
            found.append(
                fault("placement", f"{node.name} has {has} {what}s, and of {asked} workers with one each "
                      f"{asked - len(missing)} found a place: {missing[0]}",
                      "another run may hold them (ray status): wait for it, stop it, or add nodes")
            )  # fmt: skip
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
