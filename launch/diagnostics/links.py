"""Measures the links between nodes: latency and bandwidth of pairs and of an all-reduce, between workers that Ray
places like a run's. Plans use the slowest pair, and the all-reduce. A run measures the links inside a node itself.

    round 0   a - b   c - d      pairs without a common node are measured at once, as a run uses them,
    round 1   a - c   b - d      and in each pair all GPUs of a node, each with the one of its index

Two message sizes give both: the small one costs the latency, and the large one's extra time is due to its bytes.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from launch.backends.link_cache import LinkSpeeds
from launch.backends.network_interface import rendezvous_store, use_interface_of
from launch.diagnostics.finding import Finding, fault, ok, warning
from launch.diagnostics.probes import Host
from launch.ray_nodes import collect, start_on
from launch.worker.distributed import init_process_group, one_way_s, time_s
from suite.log import Log
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

BEGIN_S, ROUND_S = 60.0, 30.0
"""Seconds for the workers to meet and reduce, and for each round: gloo and NCCL connect on the first message."""

ALL_PAIRS = 8
"""Up to this many nodes, a power of two, every pair is measured; above, each node with the next, in at most three
rounds."""

SLOW = 100e6
"""Bytes a second. A gigabit port gives 117 million; below 100, a port or cable has fallen back to a lower speed or
traffic is shaped, and a stage's 16 MiB take a sixth of a second, which no schedule hides."""

COMPARED_BYTES = 2**20
"""Size of the message by which links are compared."""

Pair = tuple[int, int]
Worker = tuple[Host, int]
"""A node and a number of the worker there."""


@dataclass(frozen=True)
class Place:
    """Which worker this is: one of ``per_node`` on each of ``nodes`` nodes."""

    node: int
    index: int
    nodes: int
    per_node: int

    @property
    def world(self) -> int:
        return self.nodes * self.per_node

    def rank_on(self, node: int) -> int:
        """Returns the rank of the worker of the same index on a node."""
        return node * self.per_node + self.index


@dataclass(frozen=True)
class LinkMeasurements:
    """The links of a worker with those of its index on other nodes, and of the all-reduce over these."""

    pairs: dict[Pair, Link]
    """By pair of nodes."""
    reduced: Link
    network: str = ""
    """What NCCL calls the network that it uses, such as IB or Socket; empty without it."""


class LinkActor:
    """A measuring process with one device."""

    def ready(self, address: str) -> tuple[str, int]:
        """Opens a store at its node's address, which keeps its port open for this worker. Returns the GPU that Ray gave
        it, empty without one, and the port."""
        use_interface_of(address)
        self._store = rendezvous_store(address)
        self._store.set_timeout(TIMEOUT)
        return os.environ.get("CUDA_VISIBLE_DEVICES", ""), int(self._store.port)

    def measure(self, place: Place, host: str, port: int, use_gpu: bool) -> LinkMeasurements:
        """Measures with the other workers; they meet in the first one's store. Returns the pairs of which this is on
        the first node."""
        rank = place.rank_on(place.node)
        store = self._store if rank == 0 else TCPStore(host, port, is_master=False, timeout=TIMEOUT)
        gpu = 0 if use_gpu else None  # a Ray worker sees only its own
        log = Path(tempfile.gettempdir()) / f"gpipe-nccl-{os.getpid()}"
        os.environ.update(NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="INIT,NET", NCCL_DEBUG_FILE=str(log))
        device = init_process_group(rank, place.world, store, 1, gpu, TIMEOUT_S)
        found: dict[Pair, Link] = {}
        for pairs in rounds_of(place.nodes):
            dist.all_reduce(torch.zeros(1))  # all begin a round together
            for pair in pairs:
                if place.node in pair:
                    link = _pair_link(place.rank_on(sum(pair) - place.node), device)
                    found |= {pair: link} if place.node == pair[0] else {}
        reduced = _reduction(place, device)
        dist.destroy_process_group()
        network = network_of(log.read_text()) if log.exists() else ""
        log.unlink(missing_ok=True)
        return LinkMeasurements(found, reduced, network)


def rounds_of(world: int) -> list[list[Pair]]:
    """Returns the pairs of ranks to measure: all, or of many workers a ring. A rank has one pair a round at most; where
    all meet, a and b do so in round a xor b."""
    if world <= ALL_PAIRS:
        pairs = [*combinations(range(world), 2)]
        parts = [[(a, b) for a, b in pairs if a ^ b == number] for number in range(1, ALL_PAIRS)]
    else:
        ring = [*pairwise(range(world)), (0, world - 1)]
        even = world - world % 2
        parts = [ring[:even:2], ring[1:even:2], ring[even:]]
    return [part for part in parts if part]


def network_of(log: str) -> str:
    """Returns the network of NCCL's log, which has lines such as ``NCCL INFO Using network IB``."""
    found = re.search(r"Using network (.+)", log)
    return found[1].strip() if found else ""


def _pair_link(peer: int, device: torch.device) -> Link:
    def agree_on(size: Tensor) -> None:
        """Gives both ranks the lower one's size."""
        dist.send(size, peer) if dist.get_rank() < peer else dist.recv(size, peer)

    return _fit_link(lambda size: one_way_s(peer, size, device), 1, agree_on)


def _reduction(place: Place, device: torch.device) -> Link:
    """Measures the all-reduces over the workers of each index, all at once, as replicas reduce."""
    ranks = range(place.world)
    groups = [dist.new_group(ranks[index :: place.per_node]) for index in range(place.per_node)]

    def reduce(size: int) -> float:
        values = torch.zeros(max(1, size // 4), device=device)
        return time_s(lambda: dist.all_reduce(values, group=groups[place.index]), device)

    link = _fit_link(reduce, 4, lambda size: dist.all_reduce(size, dist.ReduceOp.MIN))
    return Link(link.latency_s, link.bytes_per_s * 2 * (place.nodes - 1) / place.nodes)


def _fit_link(measure_s: Callable[[int], float], small: int, agree_on: Callable[[Tensor], object]) -> Link:
    measure_s(small)  # the first message opens the connection
    latency = measure_s(small)
    trial = measure_s(LEAST)
    rate = LEAST / max(trial - latency, 1e-6)
    size = torch.tensor([int(min(MOST, max(LEAST, rate * LARGE_S)))])
    agree_on(size)
    return Link(latency, int(size) / max(measure_s(int(size)) - latency, 1e-9))


def measure_links(nodes: Sequence[Host], cluster: str, log: Log) -> tuple[LinkSpeeds | None, list[Finding]]:
    """Measures between the nodes of a cluster that have a device: with a worker on each GPU, or one on each node of
    CPUs. Returns the speeds for plans; None with fewer than two nodes, or if they do not connect."""
    import ray

    use_gpu = any(node.gpus for node in nodes)
    counts = {node: node.gpus if use_gpu else min(1, node.cpus or 0) for node in nodes}
    wanted = [(node, number) for node, count in counts.items() for number in range(count or 0)]
    if len({node for node, _ in wanted}) < 2:
        return None, []
    needs: dict[str, Any] = {"num_gpus": 1, "num_cpus": 0} if use_gpu else {"num_cpus": 1}
    actors = {worker: start_on(worker[0].id, LinkActor, **needs) for worker in wanted}
    try:
        calls = {worker: actor.ready.remote(worker[0].address) for worker, actor in actors.items()}
        ready, late = collect(calls, PLACE_S)
        placed, found = _placed(ready, late, wanted)
        if len(placed) < 2:
            return None, found
        per_node, rounds = len(placed[0]), rounds_of(len(placed))
        log(f"measuring {per_node * sum(map(len, rounds))} links between {len(placed)} nodes")
        first = placed[0][0]
        places = {
            worker: Place(node, index, len(placed), per_node)
            for node, workers in enumerate(placed)
            for index, worker in enumerate(workers)
        }
        answers, silent = collect(
            {
                worker: actors[worker].measure.remote(place, first[0].address, ready[first][1], use_gpu)
                for worker, place in places.items()
            },
            BEGIN_S + ROUND_S * len(rounds),
        )
    finally:
        for actor in actors.values():
            ray.kill(actor)
    if silent:
        (node, _), why = next(iter(silent.items()))
        remedy = "open TCP between all nodes from port 10002 on, or set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
        return None, [*found, fault("links", f"they could not be measured: {node.name}: {why}", remedy)]
    names = {worker: f"{worker[0].name} GPU {gpu}" if gpu else worker[0].name for worker, (gpu, _) in ready.items()}
    speeds, summary = _summary(cluster, placed, names, answers)
    return speeds, [*found, *summary]


def _placed(
    ready: Mapping[Worker, tuple[str, int]], late: Mapping[Worker, str], wanted: Sequence[Worker]
) -> tuple[list[list[Worker]], list[Finding]]:
    """Returns the workers of each node that has any, in the order of their GPUs and equally many on each; and a finding
    for each node that lacks some."""
    remedy = "another run may use its devices (ray status): wait for it, stop it, or add nodes"
    placed, found = [], []
    for node in dict.fromkeys(node for node, _ in wanted):
        workers = sorted((worker for worker in ready if worker[0] == node), key=lambda worker: ready[worker])
        if reasons := [why for worker, why in late.items() if worker[0] == node]:
            lacking = f"{len(reasons)} of {len(reasons) + len(workers)} workers are not ready: {reasons[0]}"
            found.append((warning if workers else fault)("placement", f"{node.name}: {lacking}", remedy))
        if workers:
            placed.append(workers)
    least = min(map(len, placed), default=0)
    return [workers[:least] for workers in placed], found


def _summary(
    cluster: str, placed: list[list[Worker]], names: Mapping[Worker, str], answers: Mapping[Worker, LinkMeasurements]
) -> tuple[LinkSpeeds, list[Finding]]:
    """Returns the speeds for plans, which are the slowest, and findings."""
    links = {
        (names[placed[a][index]], names[placed[b][index]]): link
        for workers in placed
        for index, worker in enumerate(workers)
        for (a, b), link in answers[worker].pairs.items()
    }
    slowest = max(links.values(), key=_compared_s)
    reduced = max((answers[worker].reduced for worker in placed[0]), key=_compared_s)
    shared = ok("all-reduce", f"over {len(placed)} nodes: {format_link(reduced)}")
    used = networks({worker[0].name: answer.network for worker, answer in answers.items()})
    return LinkSpeeds(cluster, slowest, reduced), [*findings_of(links), shared, *used]


def _compared_s(link: Link) -> float:
    return link.seconds(COMPARED_BYTES)


def networks(by_node: dict[str, str]) -> list[Finding]:
    """Returns which network NCCL uses, by the names of the nodes: a warning for sockets; nothing without NCCL."""
    sockets = [node for node, network in by_node.items() if network == "Socket"]
    if sockets:
        remedy = "if there is InfiniBand: ibstat, /dev/infiniband in the container, NCCL_IB_HCA, NCCL_IB_DISABLE"
        return [warning("network", f"NCCL uses sockets on {', '.join(sockets)}", remedy)]
    used = sorted({network for network in by_node.values() if network})
    return [ok("network", f"NCCL uses {', '.join(used)}")] if used else []


def findings_of(links: dict[tuple[str, str], Link]) -> list[Finding]:
    """Returns a warning for each slow link by the names of its nodes, or else one line with the slowest."""
    shown = {names: f"{names[0]} - {names[1]}: {format_link(link)}" for names, link in links.items()}
    remedy = "check its ports and cables (ethtool), its limits (tc qdisc), and other traffic"
    slow = [names for names, link in links.items() if link.bytes_per_s < SLOW]
    port = f"less than a gigabit port's {SLOW / 1e6:.0f} MB/s"
    slowest = max(links, key=lambda names: _compared_s(links[names]))
    fine = ok("links", f"{len(links)} measured, the slowest {shown[slowest]}")
    return [warning("links", f"{shown[names]}; {port}", remedy) for names in slow] or [fine]


def format_link(link: Link) -> str:
    return f"{link.latency_s * 1e3:.3g} ms, {link.bytes_per_s / 1e6:,.0f} MB/s"
