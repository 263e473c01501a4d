"""Measures links: latency and bandwidth, pair by pair and for an all-reduce, between workers that Ray places like a
run's, and between two processes without Ray.

Two message sizes give both: the small one costs the latency, and the large one's extra time is due to its bytes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
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


def _measure(rank: int, world: int, rendezvous: str | Store, task: LinkTask, use_gpu: bool) -> LinkMeasurements:
    """Joins the other processes, by a URL or in a store, and measures; in a pair the second rank only answers. Returns
    the pairs of which this process is the first rank, and the all-reduce."""
    gpu = rank % max(1, torch.cuda.device_count()) if use_gpu else None  # a Ray worker sees only one
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
    def agree_on(size: Tensor) -> None:
        """Gives both ranks the lower one's size."""
        dist.send(size, peer) if dist.get_rank() < peer else dist.recv(size, peer)

    return _fit_link(lambda size: one_way_s(peer, size, device), 1, agree_on)


def _reduction(group: dist.ProcessGroup, world: int, device: torch.device) -> Link:
    def reduce(size: int) -> float:
        values = torch.zeros(max(1, size // 4), device=device)
        return time_s(lambda: dist.all_reduce(values, group=group), device)

    link = _fit_link(reduce, 4, lambda size: dist.all_reduce(size, dist.ReduceOp.MIN, group=group))
    return Link(link.latency_s, link.bytes_per_s * 2 * (world - 1) / world)


def _fit_link(measure_s: Callable[[int], float], small: int, agree_on: Callable[[Tensor], object]) -> Link:
    measure_s(small)  # the first message opens the connection
    latency = measure_s(small)
    trial = measure_s(LEAST)
    rate = LEAST / max(trial - latency, 1e-6)
    size = torch.tensor([int(min(MOST, max(LEAST, rate * LARGE_S)))])
    agree_on(size)
    return Link(latency, int(size) / max(measure_s(int(size)) - latency, 1e-9))


class LinkActor:
    """A measuring process with one device."""

    def ready(self, address: str) -> int:
        """Opens a store at its node's address, which keeps its port open for this worker, and returns the port."""
        use_interface_of(address)
        self._store = rendezvous_store(address)
        self._store.set_timeout(TIMEOUT)
        return int(self._store.port)

    def measure(self, rank: int, world: int, host: str, port: int, task: LinkTask, use_gpu: bool) -> LinkMeasurements:
        """Measures with the other workers; they meet in the first worker's store."""
        store = self._store if rank == 0 else TCPStore(host, port, is_master=False, timeout=TIMEOUT)
        return _measure(rank, world, store, task, use_gpu)


def measure_with_ray(
    nodes: Sequence[Node], log: Callable[[str], None]
) -> tuple[LinkMeasurements | None, list[Finding]]:
    """Measures between workers on a cluster's nodes, two where there are at least two devices; a worker that cannot be
    placed is reported and left out."""
    import ray

    use_gpu = any(node.gpus for node in nodes)
    requested = [node for node in nodes for _ in range(min(2, (node.gpus if use_gpu else node.cpus) or 0))]
    what = "GPU" if use_gpu else "CPU"
    needs: dict[str, Any] = {"num_gpus": 1, "num_cpus": 0} if use_gpu else {"num_cpus": 1}
    actors = [start_on(node.id, LinkActor, **needs) for node in requested]
    try:
        starting = {at: actor.ready.remote(requested[at].address) for at, actor in enumerate(actors)}
        ready, silent = collect(starting, PLACE_S)
        found = _unplaced(requested, silent, what)
        placed = sorted(ready)
        placed_on = [requested[at] for at in placed]
        task = plan(placed_on)
        if not task.pairs:
            return None, found
        log(f"measuring {len(task.pairs)} links between {len(placed_on)} workers")
        host = placed_on[0].address
        measuring = {
            rank: actors[at].measure.remote(rank, len(placed_on), host, ready[placed[0]], task, use_gpu)
            for rank, at in enumerate(placed)
        }
        results, unanswered = collect(measuring, BEGIN_S + PAIR_S * len(task.pairs))
        if unanswered:
            rank, why = next(iter(unanswered.items()))
            text = f"the links could not be measured: {placed_on[rank].name}: {why}"
            remedy = "see ports above, or set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the interface of its address"
            return None, [*found, fault("links", text, remedy)]
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
        placed = f"only {asked - failed} of {asked} workers with one each were placed"
        found.append(fault("placement", f"{node.name} has {has} {what}s, but {placed}: {why}", remedy))
    return found


def plan(placed_on: Sequence[Node]) -> LinkTask:
    """Returns the task of workers on these nodes."""
    ranks_on: defaultdict[Node, list[int]] = defaultdict(list)
    for rank, node in enumerate(placed_on):
        ranks_on[node].append(rank)
    within = [(ranks[0], ranks[1]) for ranks in ranks_on.values() if len(ranks) == 2]
    firsts = [ranks[0] for ranks in ranks_on.values()]
    between = combinations(firsts, 2) if len(firsts) <= ALL_PAIRS else zip(firsts, firsts[1:] + firsts[:1], strict=True)
    reduced = firsts if len(firsts) > 1 else range(len(placed_on))
    return LinkTask({(a, b): (placed_on[a].name, placed_on[b].name) for a, b in [*within, *between]}, tuple(reduced))


def measure_without_ray(name: str) -> tuple[LinkMeasurements | None, list[Finding]]:
    """Measures between two processes of this machine, started without Ray."""
    use_gpu = torch.cuda.device_count() >= 2
    task = LinkTask({(0, 1): (name, name)}, (0, 1))
    try:
        results: list[LinkMeasurements] = run_processes(_measure, 2, task, use_gpu, deadline_s=BEGIN_S + PAIR_S)
    except (SuiteError, RuntimeError) as error:
        why = str(error).strip().splitlines()[-1]
        remedy = "check that the machine has a free core and 2 GiB of free memory"
        return None, [warning("links", f"two processes of {name} could not measure: {why}", remedy)]
    return results[0], []
