"""Which worker goes to which node: a replica's stages together, on as few nodes as hold them.

nodes      a: 4 free         b: 3 free       c: 1 free
ranks      0 1 2 3           4 5 6           7             K = 4, R = 2: replica 1 crosses from b to c once
replica    0 0 0 0           1 1 1           1

Ranks of one node follow one another, so a placement is a row of nodes, cut into replicas every K workers. That loses
nothing: nodes that share replicas form a tree, and a tree of so many nodes and replicas has as many crossings as a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, groupby

from suite.errors import PlacementError


@dataclass(frozen=True)
class Node:
    """A machine of a cluster: devices that are free now, of all it has."""

    id: str
    name: str
    free: int
    total: int

    def __str__(self) -> str:
        return f"{self.name} {self.free} of {self.total}"


@dataclass(frozen=True)
class Placement:
    """The node of every rank."""

    nodes: tuple[Node, ...]
    stages: int

    @property
    def ids(self) -> list[str]:
        """The node of each rank, by its id."""
        return [node.id for node in self.nodes]

    @property
    def replicas(self) -> int:
        """R."""
        return len(self.nodes) // self.stages

    @property
    def cuts(self) -> frozenset[int]:
        """The boundaries k, from stage k to k + 1, at which a replica goes on at another node."""
        return frozenset(rank % self.stages for rank in self._crossings)

    @property
    def spread(self) -> bool:
        """Whether replicas exchange gradients between nodes."""
        return any(
            len({node.id for node in self.nodes[stage :: self.stages]}) > 1 for stage in range(self.stages)
        )  # fmt: skip

    @property
    def _crossings(self) -> list[int]:
        """Ranks whose next stage is on another node."""
        return [
            rank
            for rank, (node, following) in enumerate(zip(self.nodes, self.nodes[1:], strict=False))
            if node.id != following.id and (rank + 1) % self.stages
        ]

    def lines(self) -> Iterator[str]:
        """Yields the placement for a person to read, a line a replica; of many replicas, the first and the count."""
        used, crossings = len({node.id for node in self.nodes}), len(self._crossings)
        boundaries = self.replicas * (self.stages - 1)
        yield (
            f"  placed on {used} node{'s' * (used > 1)}; {boundaries - crossings} of {boundaries} boundaries between "
            "stages lie inside a node"
        )
        for replica in range(min(self.replicas, 8)):
            row = list(enumerate(self.nodes[replica * self.stages : (replica + 1) * self.stages]))
            parts = []
            for _, group in groupby(row, key=lambda one: one[1].id):
                held = list(group)
                first, last = held[0][0], held[-1][0]
                stages = f"stage {first}" if first == last else f"stages {first}-{last}"
                parts.append(f"{stages} on {held[0][1].name}")
            yield f"  replica {replica}: {', '.join(parts)}"
        if self.replicas > 8:
            yield f"  and {self.replicas - 8} more replicas"


def place(nodes: Sequence[Node], stages: int, replicas: int) -> Placement:
    """Returns where ``replicas`` pipelines of ``stages`` workers go.

    Raises PlacementError, with what each node has, when there are too few free devices.
    """
    need = stages * replicas
    if sum(node.free for node in nodes) < need:
        raise PlacementError(shortage(nodes, stages, replicas))
    row: list[Node] = []
    for node, count in _row(nodes, stages, replicas):
        row += [node] * count
    return Placement(tuple(row[:need]), stages)


def shortage(nodes: Sequence[Node], stages: int, replicas: int, kind: str = "device") -> str:
    """Returns what is asked for and what each node has, in words."""
    need, free, total = stages * replicas, sum(node.free for node in nodes), sum(node.total for node in nodes)
    told = ", ".join(str(node) for node in sorted(nodes, key=lambda one: (-one.free, one.name))[:16])
    more = f" and {len(nodes) - 16} more nodes" if len(nodes) > 16 else ""
    there = f"; free of each node: {told}{more}" if nodes else ""
    return (
        f"K = {stages} stages x R = {replicas} replicas need {need} {kind}s, of the cluster's {total} are {free} "
        f"free{there}"
    )


def _row(nodes: Sequence[Node], stages: int, replicas: int) -> list[tuple[Node, int]]:
    """Returns nodes in order, with how many workers each gets; replicas are cut from it every K workers."""
    whole = {node.id: node.free // stages for node in nodes}
    if sum(whole.values()) >= replicas:
        return [(node, count * stages) for node, count in _fewest(nodes, whole, replicas)]
    left = replicas - sum(whole.values())
    line = _line([(node, node.free % stages) for node in nodes if node.free % stages], stages, left)
    shared = {node.id for node, _ in line}
    alone = [(node, whole[node.id] * stages) for node in nodes if whole[node.id] and node.id not in shared]
    return alone + [(node, whole[node.id] * stages + rest) for node, rest in line]


def _fewest(nodes: Sequence[Node], whole: dict[str, int], replicas: int) -> Iterator[tuple[Node, int]]:
    """Yields the fewest nodes that hold whole replicas, the last of them the one with the least to spare."""
    waiting = sorted((node for node in nodes if whole[node.id]), key=lambda node: (-whole[node.id], node.free))
    while replicas:
        enough = [node for node in waiting if whole[node.id] >= replicas]
        node = min(enough, key=lambda node: (whole[node.id], node.free)) if enough else waiting[0]
        waiting.remove(node)
        count = min(replicas, whole[node.id])
        replicas -= count
        yield node, count


def _line(rests: list[tuple[Node, int]], stages: int, replicas: int) -> list[tuple[Node, int]]:
    """Returns nodes whose rests, laid end to end, hold so many replicas: pairs that make up a replica first, then from
    the largest on, each replica closed by the smallest rest that closes it. What such a rest has beyond that begins the
    next replica."""
    waiting, line, open_ = sorted(rests, key=lambda one: -one[1]), [], 0
    need = stages * replicas
    while need > 0:
        lacks = stages - open_
        closing = [one for one in waiting if one[1] >= lacks]
        if not open_:
            closing = [one for one, other in combinations(waiting, 2) if one[1] + other[1] == stages][:1]
        node, rest = closing[-1] if closing else waiting[0]
        waiting.remove((node, rest))
        taken = min(rest, need)
        line.append((node, taken))
        need -= taken
        open_ = (open_ + taken) % stages
    return line
