"""Measures the links between nodes: latency and bandwidth of pairs and of an all-reduce, between workers that Ray
places like a run's. Plans use the slowest pair, and the all-reduce. A run measures the links inside a node itself.

    round 0   a - b   c - d      pairs of nodes without a common one are measured at once, as a run uses them,
    round 1   a - c   b - d      and in each pair all GPUs, the n-th of one node with the n-th of the other

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
NamedLink = tuple[str, Link]
"""The names of a link's ends, and the link."""


@dataclass(frozen=True)
class LinkMeasurements:
    """The links of a worker with the workers of its index on other nodes, and of the all-reduce over these."""

    pairs: dict[Pair, Link]
    """By pair of nodes."""
    reduced: Link
    network: str = ""
    """What NCCL calls the network that it uses, such as IB or Socket; empty without it."""


class LinkActor:
    """A measuring process with one device."""

    def ready(self, address: str, use_gpu: bool) -> tuple[str, int]:
        """Opens a store at its node's address, which keeps its port open for this worker. Returns its GPU's id, empty
        without one, and the port."""
        gpu = _own_gpu() if use_gpu else ""
        use_interface_of(address)
        self._store = rendezvous_store(address)
        self._store.set_timeout(TIMEOUT)
        return gpu, int(self._store.port)

    def measure(self, rank: int, nodes: int, per_node: int, host: str, port: int, use_gpu: bool) -> LinkMeasurements:
        """Measures with the other workers; they meet in the first one's store. Returns the pairs of which this is on
        the first node. Ranks count first the workers of node 0."""
        node, index = divmod(rank, per_node)
        store = self._store if rank == 0 else TCPStore(host, port, is_master=False, timeout=TIMEOUT)
        gpu = 0 if use_gpu else None  # it sees only its own
        log = Path(tempfile.gettempdir()) / f"gpipe-nccl-{os.getpid()}"
        os.environ.update(NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="INIT,NET", NCCL_DEBUG_FILE=str(log))
        device = init_process_group(rank, nodes * per_node, store, 1, gpu, TIMEOUT_S)
        found: dict[Pair, Link] = {}
        for pairs in rounds_of(nodes):
            pair = next((pair for pair in pairs if node in pair), None)
            other = node if pair is None else sum(pair) - node
            link = _pair_link(rank + (other - node) * per_node, device)
            found |= {pair: link} if pair is not None and node == pair[0] else {}
        ranks = [*range(nodes * per_node)]
        groups = [dist.new_group(ranks[first::per_node]) for first in range(per_node)]
        reduced = _reduction(groups[index], nodes, device)
        dist.destroy_process_group()
        network = network_of(log.read_text()) if log.exists() else ""
        log.unlink(missing_ok=True)
        return LinkMeasurements(found, reduced, network)


def _own_gpu() -> str:
    """Returns the id of the GPU that Ray gave this process, and hides the others: Ray can be told not to."""
    import ray

    (gpu,) = ray.get_runtime_context().get_accelerator_ids()["GPU"]
    os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    return str(gpu)


def rounds_of(nodes: int) -> list[list[Pair]]:
    """Returns the pairs of nodes to measure: all, or of many nodes a ring. A node has one pair a round at most; where
    all meet, a and b do so in round a xor b."""
    if nodes <= ALL_PAIRS:
        pairs = [*combinations(range(nodes), 2)]
        parts = [[(a, b) for a, b in pairs if a ^ b == number] for number in range(1, ALL_PAIRS)]
    else:
        ring = [*pairwise(range(nodes)), (0, nodes - 1)]
        even = nodes - nodes % 2
        parts = [ring[:even:2], ring[1:even:2], ring[even:]]
    return [part for part in parts if part]


def network_of(log: str) -> str:
    """Returns the network of NCCL's log, which has lines such as ``NCCL INFO Using network IB``."""
    found = re.search(r"Using network (.+)", log)
    return found[1].strip() if found else ""


def _pair_link(peer: int, device: torch.device) -> Link:
    """Measures the link to a peer while all other workers measure theirs; one that is its own peer waits for them."""
    if peer == dist.get_rank():
        return _fit_link(lambda size: 0.0, 1)
    return _fit_link(lambda size: one_way_s(peer, size, device), 1)


def _reduction(group: Any, nodes: int, device: torch.device) -> Link:
    """Measures the all-reduce of a group while all other groups measure theirs, as replicas of all stages reduce."""

    def reduce(size: int) -> float:
        values = torch.zeros(max(1, size // 4), device=device)
        return time_s(lambda: dist.all_reduce(values, group=group), device)

    link = _fit_link(reduce, 4)
    return Link(link.latency_s, link.bytes_per_s * 2 * (nodes - 1) / nodes)


def _fit_link(measure_s: Callable[[int], float], small: int) -> Link:
    """Fits a link to a small and a large message, whose size all workers agree on, and which all begin together."""
    measure_s(small)  # the first message opens the connection
    dist.all_reduce(torch.zeros(1))
    latency = measure_s(small)
    trial = measure_s(LEAST)
    rate = LEAST / max(trial - latency, 1e-6)
    size = torch.tensor([int(min(MOST, max(LEAST, rate * LARGE_S)))])
    dist.all_reduce(size, dist.ReduceOp.MIN)
    return Link(latency, int(size) / max(measure_s(int(size)) - latency, 1e-9))


def measure_links(nodes: Sequence[Host], cluster: str, log: Log) -> tuple[LinkSpeeds | None, list[Finding]]:
    """Measures between the nodes of a cluster that have a device: with a worker on each GPU, or one on each node of
    CPUs. Returns the speeds for plans; None with fewer than two nodes, or if they do not connect."""
    import ray

    use_gpu = any(node.gpus for node in nodes)
    counts = {node: (node.gpus or 0) if use_gpu else min(1, node.cpus or 0) for node in nodes}
    wanted = [(node, number) for node in nodes for number in range(counts[node])]
    if len({node for node, _ in wanted}) < 2:
        return None, []
    needs: dict[str, Any] = {"num_gpus": 1, "num_cpus": 0} if use_gpu else {"num_cpus": 1}
    actors = {worker: start_on(worker[0].id, LinkActor, **needs) for worker in wanted}
    try:
        calls = {worker: actor.ready.remote(worker[0].address, use_gpu) for worker, actor in actors.items()}
        ready, late = collect(calls, PLACE_S)
        placed, found = _placed(ready, late, wanted)
        if len(placed) < 2:
            return None, found
        per_node, rounds = len(placed[0]), rounds_of(len(placed))
        log(f"measuring {per_node * sum(map(len, rounds))} links between {len(placed)} nodes")
        first, shape = placed[0][0], (len(placed), per_node)
        store = first[0].address, ready[first][1], use_gpu
        ranks = enumerate(worker for workers in placed for worker in workers)
        calls = {worker: actors[worker].measure.remote(rank, *shape, *store) for rank, worker in ranks}
        answers, silent = collect(calls, BEGIN_S + ROUND_S * len(rounds))
    finally:
        for actor in actors.values():
            ray.kill(actor)
    if silent:
        (node, _), why = next(iter(silent.items()))
        remedy = "open TCP between all nodes from port 10002 on, or set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
        return None, [*found, fault("links", f"they could not be measured: {node.name}: {why}", remedy)]
    gpus = {worker: gpu for worker, (gpu, _) in ready.items()}
    speeds, measured = _summary(cluster, placed, gpus, answers)
    return speeds, [*found, *measured]


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
    cluster: str, placed: list[list[Worker]], gpus: Mapping[Worker, str], answers: Mapping[Worker, LinkMeasurements]
) -> tuple[LinkSpeeds, list[Finding]]:
    """Returns the speeds for plans, which are the slowest, and findings."""
    names = {worker: f"{worker[0].name} GPU {gpu}" if gpu else worker[0].name for worker, gpu in gpus.items()}
    links: dict[tuple[str, str], list[NamedLink]] = {}
    for workers in placed:
        for index, worker in enumerate(workers):
            for (a, b), link in answers[worker].pairs.items():
                ends = placed[a][index], placed[b][index]
                of_nodes = links.setdefault((ends[0][0].name, ends[1][0].name), [])
                of_nodes.append((f"{names[ends[0]]} - {names[ends[1]]}", link))
    per_node = len(placed[0])
    slowest = max((link for of_pair in links.values() for _, link in of_pair), key=_compared_s)
    reduced = max((answers[worker].reduced for worker in placed[0]), key=_compared_s)
    at_once = "" if per_node == 1 else f", {per_node} GPUs of each at once"
    shared = ok("all-reduce", f"over {len(placed)} nodes{at_once}: {format_link(reduced)}")
    used = networks({names[worker]: answer.network for worker, answer in answers.items()})
    return LinkSpeeds(cluster, slowest, reduced), [*findings_of(links), shared, *used]


def _compared_s(link: Link) -> float:
    return link.seconds(COMPARED_BYTES)


def networks(by_worker: dict[str, str]) -> list[Finding]:
    """Returns which network NCCL uses, by the names of the workers: a warning for sockets; nothing without NCCL."""
    sockets = [worker for worker, network in by_worker.items() if network == "Socket"]
    if sockets:
        remedy = "if there is InfiniBand: ibstat, /dev/infiniband in the container, NCCL_IB_HCA, NCCL_IB_DISABLE"
        return [warning("network", f"NCCL uses sockets on {', '.join(sockets)}", remedy)]
    used = sorted({network for network in by_worker.values() if network})
    return [ok("network", f"NCCL uses {', '.join(used)}")] if used else []


def findings_of(links: Mapping[tuple[str, str], Sequence[NamedLink]]) -> list[Finding]:
    """Returns a warning for each pair of nodes whose links are slow together, or else one line on the slowest."""
    remedy = "check its ports and cables (ethtool), its limits (tc qdisc), and other traffic"
    found, port = [], f"less than a gigabit port's {SLOW / 1e6:.0f} MB/s"
    for (a, b), of_pair in links.items():
        rate = sum(link.bytes_per_s for _, link in of_pair)
        if rate < SLOW:
            latency_s = max(link.latency_s for _, link in of_pair)
            found.append(warning("links", f"{a} - {b}: {format_link(Link(latency_s, rate))}; {port}", remedy))
    every = [named for of_pair in links.values() for named in of_pair]
    name, slowest = max(every, key=lambda named: _compared_s(named[1]))
    return found or [ok("links", f"{len(every)} measured, the slowest {name}: {format_link(slowest)}")]


def format_link(link: Link) -> str:
    return f"{link.latency_s * 1e3:.3g} ms, {link.bytes_per_s / 1e6:,.0f} MB/s"
