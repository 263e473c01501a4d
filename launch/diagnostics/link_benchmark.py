"""Measures links: latency and bandwidth, pair by pair and for an all-reduce, between workers that Ray places like a
run's, and between two processes without Ray.

Two message sizes give both: the small one costs the latency, and the large one's extra time is due to its bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from launch.backends.network_interface import rendezvous_store, use_interface_of
from launch.backends.processes import run_processes
from launch.diagnostics.finding import Finding, fault, warning
from launch.diagnostics.probes import Node
from launch.ray_nodes import collect, start_on
from launch.worker.distributed import init_process_group, one_way_s, time_s
from suite.errors import SuiteError
from suite.pipeline.planning.simulate import Link

TIMEOUT_S = 60.0
"""Seconds for one message."""

TIMEOUT = timedelta(seconds=TIMEOUT_S)

LARGE_S = 0.1
"""Target seconds of the large message, so that a slow link does not delay the others."""

LEAST, MOST = 2**18, 2**24
"""Smallest and largest size of the large message in bytes: from a laptop run's boundary to that of the paper."""

PLACE_S = 60.0
"""Seconds for a worker to be placed and to import torch while others do the same."""

BEGIN_S, PAIR_S = 60.0, 30.0
"""Seconds for the workers to meet and reduce, and for each pair: gloo and NCCL connect on the first message."""

ALL_PAIRS = 8
"""Up to this many nodes every pair is measured; above, each node with the next, so that the time grows linearly."""


@dataclass(frozen=True)
class LinkTask:
    """What a group of processes measures: pairs of ranks in turn, then an all-reduce over the ``reduced`` ranks."""

    pairs: dict[tuple[int, int], tuple[str, str]]
    """The names of their nodes, by ranks."""
    reduced: tuple[int, ...]


@dataclass(frozen=True)
class LinkMeasurements:
    """Links by the names of their nodes; for a link within a node both names are equal."""

    pairs: dict[tuple[str, str], Link]
    reduced: Link | None
    reducers: int = 0


def _measure(rank: int, world: int, rendezvous: str | Store, task: LinkTask, gpu: int | None) -> LinkMeasurements:
    """Joins the other processes, by a URL or in a store, and measures; in a pair the second rank only answers. Returns
    the pairs of which this process is the first rank, and the all-reduce."""
    device = init_process_group(rank, world, rendezvous, 1, gpu, TIMEOUT_S)
    found = {}
    for (first, second), names in task.pairs.items():
        dist.all_reduce(torch.zeros(1))  # nobody else sends meanwhile
        if rank == first:
            found[names] = _pair_link(second, device)
        elif rank == second:
            _pair_link(first, device)
    group = dist.new_group(list(task.reduced), timeout=TIMEOUT)
    reduced = _reduction(group, len(task.reduced), device) if rank in task.reduced else None
    dist.destroy_process_group()
    return LinkMeasurements(found, reduced, len(task.reduced))


def _pair_link(peer: int, device: torch.device) -> Link:
    def agree_on_size(size: int) -> int:
        """Returns the lower rank's size, on both."""
        agreed = torch.tensor([size])
        dist.send(agreed, peer) if dist.get_rank() < peer else dist.recv(agreed, peer)
        return int(agreed)

    return _fit_link(lambda size: one_way_s(peer, size, device), 1, agree_on_size)


def _reduction(group: dist.ProcessGroup, world: int, device: torch.device) -> Link:
    def reduce(size: int) -> float:
        values = torch.zeros(max(1, size // 4), device=device)
        return time_s(lambda: dist.all_reduce(values, group=group), device)

    def agreed(size: int) -> int:
        shared_size = torch.tensor([size])
        dist.all_reduce(shared_size, dist.ReduceOp.MIN, group=group)
        return int(shared_size)

    link = _fit_link(reduce, 4, agreed)
    return Link(link.latency_s, link.bytes_per_s * 2 * (world - 1) / world)


def _fit_link(measure_s: Callable[[int], float], small: int, agree_on_size: Callable[[int], int]) -> Link:
    measure_s(small)  # the first message opens the connection
    latency = measure_s(small)
    trial = measure_s(LEAST)
    rate = LEAST / max(trial - latency, 1e-6)
    size = agree_on_size(int(min(MOST, max(LEAST, rate * LARGE_S))))
    return Link(latency, size / max(measure_s(size) - latency, 1e-9))


class LinkActor:
    """A measuring process with one device."""

    def __init__(self, address: str) -> None:
        self._address = address

    def ready(self) -> int:
        """Opens a store, which keeps its port open for this worker, and returns the port."""
        use_interface_of(self._address)
        self._store = rendezvous_store(self._address)
        self._store.set_timeout(TIMEOUT)
        return int(self._store.port)

    def measure(self, rank: int, world: int, host: str, port: int, task: LinkTask, use_gpu: bool) -> LinkMeasurements:
        """Measures with the other workers; they meet in the first worker's store."""
        store = self._store if rank == 0 else TCPStore(host, port, is_master=False, timeout=TIMEOUT)
        return _measure(rank, world, store, task, 0 if use_gpu else None)


def actors_per_node(nodes: Sequence[Node]) -> tuple[list[Node], bool]:
    """Returns each worker's node (two workers on a node with at least two devices), and whether devices are GPUs."""
    use_gpu = any(node.gpus for node in nodes)
    return [node for node in nodes for _ in range(min(2, (node.gpus if use_gpu else node.cpus) or 0))], use_gpu


def measure_with_ray(
    nodes: Sequence[Node], log: Callable[[str], None]
) -> tuple[LinkMeasurements | None, list[Finding]]:
    """Measures between workers on a cluster's nodes; a worker that cannot be placed is reported and left out."""
    import ray

    requested, use_gpu = actors_per_node(nodes)
    what = "GPU" if use_gpu else "CPU"
    needs: dict[str, Any] = {"num_gpus": 1, "num_cpus": 0} if use_gpu else {"num_cpus": 1}
    actors = [start_on(node.id, LinkActor, node.address, **needs) for node in requested]
    try:
        ready, silent = collect({at: actor.ready.remote() for at, actor in enumerate(actors)}, PLACE_S)
        found = _unplaced(requested, silent, what)
        placed = sorted(ready)
        placed_on = [requested[at] for at in placed]
        task = plan(placed_on)
        if not task.pairs:
            return None, found
        log(f"measuring {len(task.pairs)} links between {len(placed_on)} workers")
        host = placed_on[0].address
        results, unanswered = collect(
            {
                rank: actors[at].measure.remote(rank, len(placed_on), host, ready[placed[0]], task, use_gpu)
                for rank, at in enumerate(placed)
            },
            BEGIN_S + PAIR_S * len(task.pairs),
        )
        if unanswered:
            rank, why = next(iter(unanswered.items()))
            return None, [*found, _link_fault(placed_on[rank].name, why)]
        pairs = {names: link for one in results.values() for names, link in one.pairs.items()}
        return replace(results[task.reduced[0]], pairs=pairs), found
    finally:
        for actor in actors:
            ray.kill(actor)


def _unplaced(requested: Sequence[Node], silent: dict[int, str], what: str) -> list[Finding]:
    """Returns a finding for each node on which not all workers were placed."""
    missing = {requested[at]: why for at, why in silent.items()}
    remedy = "another run may use them (ray status): wait for it, stop it, or add nodes"
    found = []
    for node, why in missing.items():
        asked, failed = requested.count(node), sum(requested[at] == node for at in silent)
        has = node.gpus if what == "GPU" else node.cpus
        results = (
            f"{node.name} has {has} {what}s, but only {asked - failed} of {asked} workers with one each were placed"
        )
        found.append(fault("placement", f"{results}: {why}", remedy))
    return found


def _link_fault(name: str, why: str) -> Finding:
    remedy = "see ports above, or set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the interface of its address"
    return fault("links", f"the links could not be measured: {name}: {why}", remedy)


def plan(placed_on: Sequence[Node]) -> LinkTask:
    """Returns the task of workers on these nodes."""
    first: dict[Node, int] = {}
    second: dict[Node, int] = {}
    for rank, node in enumerate(placed_on):
        (second if node in first else first).setdefault(node, rank)
    nodes = list(first)
    within = [(first[node], second[node]) for node in nodes if node in second]
    if len(nodes) <= ALL_PAIRS:
        between = [(first[a], first[b]) for at, a in enumerate(nodes) for b in nodes[at + 1 :]]
    else:
        between = [(first[a], first[b]) for a, b in zip(nodes, [*nodes[1:], nodes[0]], strict=True)]
    reduced = tuple(sorted(first.values())) if len(nodes) > 1 else tuple(range(len(placed_on)))
    return LinkTask({(a, b): (placed_on[a].name, placed_on[b].name) for a, b in [*within, *between]}, reduced)


def measure_without_ray(name: str) -> tuple[LinkMeasurements | None, list[Finding]]:
    """Measures between two processes of this machine, started without Ray."""
    use_gpu = torch.cuda.device_count() >= 2
    task = LinkTask({(0, 1): (name, name)}, (0, 1))
    try:
        results: list[LinkMeasurements] = run_processes(_measure_process, 2, task, use_gpu, deadline_s=BEGIN_S + PAIR_S)
    except (SuiteError, RuntimeError) as error:
        why = str(error).strip().splitlines()[-1]
        return None, [
            warning(
                "links",
                f"two processes of {name} could not measure: {why}",
                "check that the machine has a free core and 2 GiB of free memory",
            )
        ]
    return results[0], []


def _measure_process(rank: int, world: int, rendezvous: str, task: LinkTask, use_gpu: bool) -> LinkMeasurements:
    return _measure(rank, world, rendezvous, task, rank if use_gpu else None)
