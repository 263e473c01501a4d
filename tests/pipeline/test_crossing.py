"""Skips in a plan: what passes each cut, what goes where, and that no bound of bytes is below what it bounds."""

from dataclasses import replace
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from suite.pipeline.costs import LayerCost, Taken
from suite.pipeline.crossing import Crossing, Message, crossings, messages
from suite.pipeline.memory import CellBytes, Crowd, peak_bytes
from suite.pipeline.partition import cell_ranges
from suite.pipeline.rebuild import ALL
from suite.pipeline.recipe import Recipe
from suite.pipeline.transport import outstanding
from tests.pipeline.walks import crowd, fill_drain

PLAIN = LayerCost(*[1.0] * 4, *[0] * 8)


def layer(boundary, gradient, *takes):
    return replace(PLAIN, boundary=boundary, gradient=gradient, takes=takes)


# layer 1 gives its own output (40 bytes) to layer 3; layer 0 gives 7 bytes to layer 4
SKIPPING = [
    layer(8, 0),
    layer(20 + 7, 20),  # layer 0's output, and its skip beside it
    layer(40 + 7, 40),  # layer 1's output is its skip as well
    layer(60 + 7 + 40, 60 + 40),
    layer(80 + 7, 80),
]
SKIPPING[3] = replace(SKIPPING[3], takes=(Taken(2, 40, 40, same=True),))
SKIPPING[4] = replace(SKIPPING[4], takes=(Taken(4, 7, 0, same=False),))


def test_what_passes_each_front():
    short, long = Crossing(1, 3, 40, 40, True), Crossing(0, 4, 7, 0, False)
    assert crossings(SKIPPING) == [[], [long], [short, long], [short, long], [long], []]
    assert not short.apart_at(2)
    assert short.apart_at(3)


def test_messages_go_straight_to_their_stage_and_hold_each_tensor_once():
    alone = cell_ranges((1, 1, 1, 1, 1), 5)
    assert messages(SKIPPING, alone, 0) == [Message(1, 20, 20), Message(4, 7, 0)]
    assert messages(SKIPPING, alone, 1) == [Message(2, 40, 40), Message(3, 40, 40)]
    assert messages(SKIPPING, alone, 2) == [Message(3, 60, 60)]
    assert messages(SKIPPING, alone, 3) == [Message(4, 80, 80)]
    assert messages(SKIPPING, alone, 4) == []
    # layers 2 and 3 on one stage: what layer 2 gets is also what layer 3 takes
    together = cell_ranges((2, 2, 1), 5)
    assert messages(SKIPPING, together, 0) == [Message(1, 40, 40), Message(2, 7, 0)]
    assert messages(SKIPPING, cell_ranges((3, 2), 5), 0) == [Message(1, 60 + 40 + 7, 100)]


@st.composite
def skipping_costs(draw):
    """Layers with any bytes, whose fronts hold what their skips say."""
    count = draw(st.integers(2, 7))
    size = st.integers(0, 60)
    outputs = [draw(size) for _ in range(count)]  # of the layer before: outputs[0] is the model's input
    taken: list[list[Taken]] = [[] for _ in range(count)]
    for taker in range(1, count):
        for giver in range(taker):
            if draw(st.integers(0, 3)) == 0 and taker - giver > 1:
                same = draw(st.booleans())
                width = outputs[giver + 1] if same else draw(size)
                taken[taker].append(Taken(taker - giver, width, width, same))
    costs = [
        LayerCost(*[1.0] * 4, draw(size), 0, 0, *[draw(size) for _ in range(5)], takes=tuple(taken[at]))
        for at in range(count)
    ]
    passing = crossings(costs)
    return [
        replace(
            cost,
            boundary=outputs[at] + sum(skip.bytes for skip in passing[at] if skip.apart_at(at)),
            gradient=0 if at == 0 else outputs[at] + sum(skip.gradient for skip in passing[at] if skip.apart_at(at)),
        )
        for at, cost in enumerate(costs)
    ]


@settings(deadline=None)
@given(skipping_costs(), st.integers(1, 6), st.sampled_from(["always", "except_last", "never"]), st.data())
def test_no_cell_needs_more_than_its_bound_whatever_the_other_cells_are(costs, micro_batches, remat, data):
    stages = data.draw(st.integers(1, len(costs)))
    cuts = sorted(data.draw(st.permutations(range(1, len(costs))))[: stages - 1])
    edges = [0, *cuts, len(costs)]
    cells = [range(begin, end) for begin, end in pairwise(edges)]
    sizes = CellBytes(costs, crowd(micro_batches, remat), 8.0)
    for k, (cell, actions) in enumerate(zip(cells, fill_drain(stages, micro_batches, remat), strict=True)):
        assert sizes.needs(cell[0], cell[-1] + 1) >= peak_bytes(actions, sizes.among(cells, k))


@settings(deadline=None)
@given(
    skipping_costs(), st.integers(1, 9), st.sampled_from(["interleaved", "zero_bubble"]), st.sampled_from([0, 1, ALL])
)  # fmt: skip
def test_nor_does_a_cell_of_a_stage_of_several(costs, micro_batches, name, graphs):
    """Stages are two, or three where the layers are enough: a skip may stay on one of them."""
    stages = 3 if len(costs) >= 6 else 2
    turns = len(costs) // stages
    if turns < 2:
        return
    cells = cell_ranges((*[1] * (stages * turns - 1), len(costs) - stages * turns + 1), len(costs))
    schedule = Recipe(name, (graphs,), turns).actions(stages, micro_batches)
    sizes, unsent = CellBytes(costs, Crowd.of(schedule, micro_batches), 8.0), outstanding(stages, turns)
    for at, cell in enumerate(cells):
        mine = [replace(action, turn=0) for action in schedule[at % stages] if action.turn == at // stages]
        peak = peak_bytes(mine, sizes.among(cells, at), unsent=unsent)
        assert sizes.needs(cell[0], cell[-1] + 1) >= peak


def test_a_skip_that_stays_on_a_stage_is_held_of_a_group_at_most():
    """K = 4, two cells a stage: cell 0 gives 7 bytes to cell 4 and 9 to cell 5."""
    takes = {4: Taken(4, 7, 7, same=False), 5: Taken(5, 9, 9, same=False)}
    costs = [layer(0, 0, *[takes[at]] if at in takes else []) for at in range(8)]
    for taker, one in ((4, takes[4]), (5, takes[5])):
        for at in range(taker - one.span + 1, taker + 1):
            costs[at] = replace(
                costs[at], boundary=costs[at].boundary + one.bytes, gradient=costs[at].gradient + one.gradient
            )
    schedule = Recipe("interleaved", (1,), 2).actions(4, 12)
    sizes, cells = CellBytes(costs, Crowd.of(schedule, 12), 8.0), cell_ranges((1,) * 8, 8)
    assert outstanding(4, 2) == 4
    giver, near, far = (sizes.among(cells, at) for at in (0, 4, 5))
    # of the skip that stays two wait beside the two that count as expected; of the other, eight may be under way, of
    # which the first four count with the neighbour's
    assert giver.far == (4 - 2) * 7 + (8 - 4) * 9
    assert (near.far, far.far) == ((4 - 2) * 7, (8 - 4) * 9)
    assert (giver.leaving, near.inputs, near.sent_back) == (9, 7, 0)


@settings(deadline=None)
@given(skipping_costs(), st.data())
def test_what_stages_send_each_other_is_what_they_get(costs, data):
    stages = data.draw(st.integers(2, len(costs)))
    cuts = sorted(data.draw(st.permutations(range(1, len(costs))))[: stages - 1])
    edges = [0, *cuts, len(costs)]
    cells = [range(begin, end) for begin, end in pairwise(edges)]
    sizes = CellBytes(costs, crowd(1, "never"), 8.0)
    sent = {(k, one.to): one for k in range(stages) for one in messages(costs, cells, k)}
    for k in range(1, stages):
        assert sum(one.sends for (_, to), one in sent.items() if to == k) == sizes.among(cells, k).inputs
        assert sum(one.returns for (_, to), one in sent.items() if to == k) == sizes.among(cells, k).sent_back
    for k in range(stages - 1):
        assert sum(one.returns for (giver, _), one in sent.items() if giver == k) == sizes.among(cells, k).coming_back
