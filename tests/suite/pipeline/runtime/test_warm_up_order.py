"""Who meets whom before the first mini-batch: every one blocks until the other is there, and nobody waits for ever."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from suite.pipeline.model.cells import CellPlacement
from suite.pipeline.model.topology import p2p_group_indices, warm_up_order
from suite.pipeline.runtime.skip import Skip, communicating_pairs


def rounds(links, stages):
    """Returns the pairs of workers that meet in each round: all that are next for both; and what is left when no two
    workers wait for each other."""
    lists = [list(warm_up_order(links, stage, CellPlacement(stages))) for stage in range(stages)]
    met = []
    while True:
        heads = {k: todo[0] for k, todo in enumerate(lists) if todo}
        pairs = {
            frozenset((k, other))
            for k, (kind, link, sends) in heads.items()
            for other in (link[sends] % stages,)
            if heads.get(other) == (kind, link, not sends)
        }
        if not pairs:
            return met, [todo for todo in lists if todo]
        for k in frozenset().union(*pairs):
            lists[k].pop(0)
        met.append(pairs)


def links_of(stages, virtual_stages, skips=()):
    return communicating_pairs(
        skips, [range(at, at + 1) for at in range(stages * virtual_stages)], CellPlacement(stages)
    )


@pytest.mark.parametrize("stages", [2, 5, 16, 128])
def test_neighbours_meet_in_four_rounds_however_many_stages(stages):
    met, _ = rounds(links_of(stages, 1), stages)
    assert len(met) <= 4
    assert sum(map(len, met)) == 2 * (stages - 1)  # for activations and for gradients


@given(st.integers(2, 5), st.integers(1, 4), st.data())
def test_any_skips_meet_and_no_two_links_of_two_stages_share_a_group(stages, virtual_stages, data):
    pairs = list(combinations(range(stages * virtual_stages), 2))
    skips = [
        Skip(f"{source} to {target}", source, target) for source, target in data.draw(st.sets(st.sampled_from(pairs)))
    ]
    links = links_of(stages, virtual_stages, skips)
    going = {(skip.source, skip.target) for skip in skips} | {(at, at + 1) for at in range(stages * virtual_stages - 1)}
    assert set(links) == {(source, target) for source, target in going if (target - source) % stages}
    assert rounds(links, stages)[1] == []
    groups = [
        (frozenset(cell % stages for cell in link), at)
        for link, at in p2p_group_indices(links, CellPlacement(stages)).items()
    ]
    assert len(set(groups)) == len(links)


def test_a_pipeline_with_one_link_for_each_pair_of_stages_has_one_group():
    assert set(p2p_group_indices(links_of(4, 1, (Skip("a", 0, 3),)), CellPlacement(4)).values()) == {0}
    assert p2p_group_indices(links_of(2, 3, (Skip("a", 1, 4),)), CellPlacement(2)) == {
        (0, 1): 0, (1, 2): 1, (1, 4): 2, (2, 3): 3, (3, 4): 4, (4, 5): 5
    }  # fmt: skip
