"""The processes that measure links: workers that Ray places like a run's, and two processes without Ray."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from launch.backends.interfaces import use_interface_of
from launch.diagnostics import link_benchmark
from launch.diagnostics.finding import Finding, fault, warning
from launch.diagnostics.nodes import Node
from launch.diagnostics.ray_probes import collect, pinned
from suite.errors import SuiteError
from suite.pipeline.planning.simulate import Link

PLACE_S = 60.0
"""Seconds for a worker to be placed and to import torch while others do the same."""

BEGIN_S, PAIR_S = 60.0, 30.0
"""Seconds for the workers to meet and reduce, and for each pair: gloo and NCCL connect on the first message."""

ALL_PAIRS = 8
"""Up to this many nodes every pair is measured; above, each node with the next, so that the time grows linearly."""


class LinkActor:
    """A measuring process with one device."""

    def __init__(self, address: str) -> None:
        self._address = address

    def ready(self) -> int:
        """Opens a store, which keeps its port open for this worker, and returns the port."""
        use_interface_of(self._address)
        self._store = link_benchmark.open_store(self._address)
        return int(self._store.port)

    def measure(
        self, rank: int, world: int, host: str, port: int, task: link_benchmark.LinkTask, use_gpu: bool
    ) -> link_benchmark.TaskResult:
        """Measures with the other workers; they meet in the first worker's store."""
        store = self._store if rank == 0 else link_benchmark.join_store(host, port)
        return link_benchmark.measure(rank, world, store, task, use_gpu)


@dataclass(frozen=True)
class LinkMeasurements:
    """Links by the names of their nodes; for a link within a node both names are equal."""

    pairs: dict[tuple[str, str], Link]
    reduced: Link | None
    reducers: int = 0


def actors_per_node(nodes: Sequence[Node]) -> tuple[list[Node], bool]:
    """Returns each worker's node (two workers on a node with at least two devices), and whether devices are GPUs."""
    use_gpu = any(node.gpus for node in nodes)
    return [node for node in nodes for _ in range(min(2, (node.gpus if use_gpu else node.cpus) or 0))], use_gpu


def by_ray(nodes: Sequence[Node], log: Callable[[str], None]) -> tuple[LinkMeasurements | None, list[Finding]]:
    """Measures between workers on a cluster's nodes; a worker that cannot be placed is reported and left out."""
    import ray

    requested, use_gpu = actors_per_node(nodes)
    what = "GPU" if use_gpu else "CPU"
    needs: dict[str, Any] = {"num_gpus": 1, "num_cpus": 0} if use_gpu else {"num_cpus": 1}
    actors = [ray.remote(LinkActor).options(**pinned(node), **needs).remote(node.address) for node in requested]
    try:
        ready, silent = collect({at: actor.ready.remote() for at, actor in enumerate(actors)}, PLACE_S)  # type: ignore[attr-defined]
        found = _unplaced(requested, silent, what)
        placed = sorted(ready)
        placed_on = [requested[at] for at in placed]
        task, pair_names = plan(placed_on)
        if not task.pairs:
            return None, found
        log(f"measuring {len(task.pairs)} links between {len(placed_on)} workers")
        host = placed_on[0].address
        results, unanswered = collect(
            {
                rank: actors[at].measure.remote(rank, len(placed_on), host, ready[placed[0]], task, use_gpu)  # type: ignore[attr-defined]
                for rank, at in enumerate(placed)
            },
            BEGIN_S + PAIR_S * len(task.pairs),
        )
        if unanswered:
            rank, why = next(iter(unanswered.items()))
            return None, [*found, _link_fault(placed_on[rank].name, why)]
        pairs = {pair_names[pair]: link for one in results.values() for pair, link in one.pairs.items()}
        return LinkMeasurements(pairs, results[task.reduced[0]].reduced, len(task.reduced)), found
    finally:
        for actor in actors:
            ray.kill(actor)  # type: ignore[arg-type]


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


def plan(placed_on: Sequence[Node]) -> tuple[link_benchmark.LinkTask, dict[tuple[int, int], tuple[str, str]]]:
    """Returns the task of workers on these nodes, and the node names of each pair."""
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
    pairs = (*within, *between)
    reduced = tuple(sorted(first.values())) if len(nodes) > 1 else tuple(range(len(placed_on)))
    return link_benchmark.LinkTask(pairs, reduced), {
        pair: (placed_on[pair[0]].name, placed_on[pair[1]].name) for pair in pairs
    }


def measure_without_ray(name: str) -> tuple[LinkMeasurements | None, list[Finding]]:
    """Measures between two processes of this machine, started without Ray."""
    import torch

    from launch.backends.processes import run_processes

    use_gpu = torch.cuda.device_count() >= 2
    task = link_benchmark.LinkTask(((0, 1),), (0, 1))
    try:
        results: list[link_benchmark.TaskResult] = run_processes(
            _measure_process, 2, task, use_gpu, deadline_s=BEGIN_S + PAIR_S
        )
    except (SuiteError, RuntimeError) as error:
        why = str(error).strip().splitlines()[-1]
        return None, [
            warning("links", f"two processes of {name} could not measure: {why}",
                    "check that the machine has a free core and 2 GiB of free memory")
        ]  # fmt: skip
    return LinkMeasurements({(name, name): results[0].pairs[0, 1]}, results[0].reduced, 2), []


def _measure_process(
    rank: int, world: int, rendezvous: str, task: link_benchmark.LinkTask, use_gpu: bool
) -> link_benchmark.TaskResult:
    if use_gpu:
        import torch

        torch.cuda.set_device(rank)
    return link_benchmark.measure(rank, world, rendezvous, task, use_gpu)
