"""Places workers on nodes: a replica's stages together, on as few nodes as possible.

nodes      a: 4 free         b: 3 free       c: 1 free
ranks      0 1 2 3           4 5 6           7             K = 4, R = 2: replica 1 crosses from b to c once
replica    0 0 0 0           1 1 1           1

Ranks of a node are consecutive, so a placement is a row of nodes, divided into replicas every K workers. This is no
restriction: nodes that share replicas form a tree, and a tree has as many crossings as a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations, groupby
from operator import attrgetter, itemgetter

from suite.errors import PlacementError


@dataclass(frozen=True)
class Node:
    """A machine of a cluster: its free devices, and all of them."""

    id: str
    name: str
    free: int
    total: int

    def __str__(self) -> str:
        return f"{self.name}: {self.free} of {self.total}"


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
    def cuts(self) -> frozenset[int]:
        """The cuts k, from stage k to k + 1, at which a replica continues on another node."""
        return frozenset(rank % self.stages for rank in self._crossings)

    @property
    def spread(self) -> bool:
        """Whether replicas exchange gradients between nodes."""
        return any(len({node.id for node in self.nodes[stage :: self.stages]}) > 1 for stage in range(self.stages))

    @property
    def _crossings(self) -> list[int]:
        """Ranks whose next stage is on another node."""
        return [
            rank
            for rank, (node, following) in enumerate(zip(self.nodes, self.nodes[1:], strict=False))
            if node.id != following.id and (rank + 1) % self.stages
        ]

    def lines(self) -> Iterator[str]:
        """Yields the placement as text, a line a replica; of many replicas, the first ones and the count."""
        used, crossings = len({node.id for node in self.nodes}), len(self._crossings)
        replicas = len(self.nodes) // self.stages
        links = replicas * (self.stages - 1)
        yield (
            f"  placed on {used} node{'s' * (used > 1)}; {links - crossings} of {links} links between "
            "stages lie inside a node"
        )
        for replica in range(min(replicas, 8)):
            row = list(enumerate(self.nodes[replica * self.stages : (replica + 1) * self.stages]))
            parts = []
            for _, group in groupby(row, key=lambda entry: entry[1].id):
                same_node = list(group)
                first, last = same_node[0][0], same_node[-1][0]
                stages = f"stage {first}" if first == last else f"stages {first}-{last}"
                parts.append(f"{stages} on {same_node[0][1].name}")
            yield f"  replica {replica}: {', '.join(parts)}"
        if replicas > 8:
            yield f"  and {replicas - 8} more replicas"


def place(nodes: Sequence[Node], stages: int, replicas: int) -> Placement:
    """Returns where ``replicas`` pipelines of ``stages`` workers go.

    Raises PlacementError, with what each node has, when there are too few free devices.
    """
    need = stages * replicas
    if sum(node.free for node in nodes) < need:
        raise PlacementError(shortage(nodes, stages, replicas))
    by_name = sorted(nodes, key=attrgetter("name"))  # names tell racks apart, mostly
    row = [node for node, count in _row(by_name, stages, replicas) for _ in range(count)]
    return Placement(tuple(row[:need]), stages)


def shortage(nodes: Sequence[Node], stages: int, replicas: int, kind: str = "device") -> str:
    """Returns a message with the requested devices and the free devices of each node."""
    need, free, total = stages * replicas, sum(node.free for node in nodes), sum(node.total for node in nodes)
    listed = ", ".join(str(node) for node in sorted(nodes, key=lambda node: (-node.free, node.name))[:16])
    more = f" and {len(nodes) - 16} more nodes" if len(nodes) > 16 else ""
    free_per_node = f" ({listed}{more})" if nodes else ""
    return (
        f"K = {stages} stages x R = {replicas} replicas need {need} {kind}s; {free} of the cluster's {total} are "
        f"free{free_per_node}"
    )


def _row(nodes: Sequence[Node], stages: int, replicas: int) -> list[tuple[Node, int]]:
    """Returns nodes in order, with how many workers each gets; replicas are cut from it every K workers."""
    whole_replicas = {node.id: node.free // stages for node in nodes}
    if sum(whole_replicas.values()) >= replicas:
        return [(node, count * stages) for node, count in _fewest(nodes, whole_replicas, replicas)]
    remaining = replicas - sum(whole_replicas.values())
    leftovers = [(node, node.free % stages) for node in nodes if node.free % stages]
    lines = [_line(leftovers, stages, remaining, use_excess) for use_excess in (True, False)]
    line = min((line for line in lines if line is not None), key=lambda line: _split(line, stages))
    shared = {node.id for node, _ in line}
    alone = [
        (node, whole_replicas[node.id] * stages) for node in nodes if whole_replicas[node.id] and node.id not in shared
    ]
    return alone + [(node, whole_replicas[node.id] * stages + leftover) for node, leftover in line]


def _fewest(nodes: Sequence[Node], whole_replicas: dict[str, int], replicas: int) -> Iterator[tuple[Node, int]]:
    """Yields the fewest nodes that hold complete replicas; the last one is the tightest fit."""
    unused = sorted(
        (node for node in nodes if whole_replicas[node.id]), key=lambda node: (-whole_replicas[node.id], node.free)
    )
    while replicas:
        enough = [node for node in unused if whole_replicas[node.id] >= replicas]
        node = min(enough, key=lambda node: (whole_replicas[node.id], node.free)) if enough else unused[0]
        unused.remove(node)
        count = min(replicas, whole_replicas[node.id])
        replicas -= count
        yield node, count


def _split(line: list[tuple[Node, int]], stages: int) -> int:
    """Returns how many nodes of a line end inside a replica."""
    return sum(end % stages > 0 for end in accumulate(count for _, count in line))


def _line(
    leftovers: list[tuple[Node, int]], stages: int, replicas: int, use_excess: bool
) -> list[tuple[Node, int]] | None:
    """Returns nodes whose leftover devices, in a row, hold ``replicas``, or None if they do not suffice.

    Pairs that make up a replica come first, then the largest; the smallest leftover that completes a replica closes it.
    With ``use_excess`` the rest of that leftover starts the next replica."""
    unused, line, partial = sorted(leftovers, key=lambda entry: -entry[1]), [], 0
    need = stages * replicas
    while need > 0:
        if not unused:
            return None
        missing = stages - partial
        closing = [entry for entry in unused if entry[1] >= missing]
        if not partial:
            closing = [larger for larger, smaller in combinations(unused, 2) if larger[1] + smaller[1] == stages][:1]
        node, leftover = min(closing, key=itemgetter(1)) if closing else unused[0]
        unused.remove((node, leftover))
        taken = min(leftover, need if use_excess else missing)
        line.append((node, taken))
        need -= taken
        partial = (partial + taken) % stages
    return line
