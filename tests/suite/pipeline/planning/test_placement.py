"""Placement: no node gets more than it has, and no placement has fewer stages that go on at another node."""

from collections import Counter
from functools import cache
from itertools import groupby

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from suite.errors import PlacementError
from suite.pipeline.planning.placement import Node, place, shortage


def nodes_of(*free):
    return [Node(f"id{at}", f"node {at}", count, 8) for at, count in enumerate(free)]


def crossings(placement):
    row, stages = placement.ids, placement.stages
    return sum(row[rank] != row[rank + 1] for rank in range(len(row) - 1) if (rank + 1) % stages)


@cache
def fewest(free, stages, replicas):
    """The fewest crossings of all ways to lay out replicas, one after the other, each over any of the nodes."""
    if not replicas:
        return 0
    return min((parts - 1 + fewest(left, stages, replicas - 1) for left, parts in layouts(free, stages)), default=10**6)


@cache
def layouts(free, need):
    """What one replica may leave free, and over how many nodes it then lies."""
    if not free:
        return {((), 0)} if need == 0 else set()
    found = set()
    for taken in range(min(free[0], need) + 1):
        for left, parts in layouts(free[1:], need - taken):
            found.add((tuple(sorted((free[0] - taken, *left))), parts + (taken > 0)))
    return found


@given(st.lists(st.integers(0, 6), min_size=1, max_size=5), st.integers(1, 5), st.integers(1, 3))
@example([3, 3, 3, 3], 5, 2)  # 3 + 2 and 3 + 2, and not 3 + 2 and 1 + 3 + 1
def test_no_node_is_overfull_ranks_stay_together_and_crossings_are_fewest(free, stages, replicas):
    nodes = nodes_of(*free)
    if sum(free) < stages * replicas:
        with pytest.raises(PlacementError):
            place(nodes, stages, replicas)
        return
    placement = place(nodes, stages, replicas)
    used = Counter(placement.ids)
    assert sum(used.values()) == stages * replicas
    assert all(used[node.id] <= node.free for node in nodes)
    assert len([node for node, _ in groupby(placement.ids)]) == len(used)  # their ranks are consecutive
    assert crossings(placement) == fewest(tuple(sorted(free)), stages, replicas)


@given(st.permutations(range(6)), st.sampled_from([(8, 3), (4, 6), (12, 2), (6, 4)]))
def test_nodes_are_taken_by_name_in_whatever_order_ray_lists_them(order, shape):
    """Neighbours by name are mostly neighbours in their rack."""
    nodes = nodes_of(*[4] * 6)
    placed = place([nodes[at] for at in order], *shape)
    assert [node for node, _ in groupby(placed.ids)] == [node.id for node in nodes]


def test_what_is_said_of_a_placement_is_what_it_is():
    placement = place(nodes_of(4, 3, 1), 4, 2)
    assert placement.cuts == {2}
    assert placement.spread
    assert list(placement.lines()) == [
        "  placed on 3 nodes; 5 of 6 links between stages lie inside a node",
        "  replica 0: stages 0-3 on node 0",
        "  replica 1: stages 0-2 on node 1, stage 3 on node 2",
    ]


@pytest.mark.parametrize(
    ("free", "stages", "replicas", "expected"),
    [
        ((8, 4), 4, 1, ["id1"] * 4),  # the node with the least to spare
        ((2, 2, 4), 2, 2, ["id2"] * 4),  # fewer nodes
        ((6, 6), 4, 3, ["id0"] * 6 + ["id1"] * 6),
        ((1, 1, 1), 3, 1, ["id0", "id1", "id2"]),
    ],
)
def test_examples_done_by_hand(free, stages, replicas, expected):
    assert place(nodes_of(*free), stages, replicas).ids == expected


def test_a_shortage_is_told_by_node_in_numbers():
    with pytest.raises(PlacementError, match="K = 3 stages x R = 2 replicas need 6 devices"):
        place(nodes_of(2, 0, 1), 3, 2)
    assert shortage(nodes_of(2, 0, 1), 3, 2, "GPU") == (
        "K = 3 stages x R = 2 replicas need 6 GPUs; 3 of the cluster's 24 are free "
        "(node 0: 2 of 8, node 2: 1 of 8, node 1: 0 of 8)"
    )
    assert "and 24 more nodes" in shortage(nodes_of(*[1] * 40), 41, 1)
