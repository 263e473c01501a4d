"""Skips in a plan: what passes each cut, and what goes where."""

from dataclasses import replace
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from suite.pipeline.model.cells import CellPlacement
from suite.pipeline.planning.costs import MessageCost, SkipCost, SkipInput, message_costs, skip_costs
from suite.pipeline.planning.memory import MemoryModel
from suite.pipeline.planning.partition import cell_ranges
from suite.pipeline.planning.stage_bytes import Sent
from tests.suite.pipeline.planning.costs import ZERO, skipping_costs


def layer(boundary, gradient, *takes):
    return replace(ZERO, boundary_bytes=boundary, gradient_bytes=gradient, skip_inputs=takes)


# layer 1 gives its own output (40 bytes) to layer 3; layer 0 gives 7 bytes to layer 4
SKIPPING = [
    layer(8, 0),
    layer(20 + 7, 20),  # layer 0's output, and its skip beside it
    layer(40 + 7, 40),  # layer 1's output is its skip as well
    layer(60 + 7 + 40, 60 + 40, SkipInput(2, 40, 40, same_as_output=True)),
    layer(80 + 7, 80, SkipInput(4, 7, 0, same_as_output=False)),
]


def test_what_passes_each_front():
    short, long = SkipCost(1, 3, 40, 40, True), SkipCost(0, 4, 7, 0, False)
    assert skip_costs(SKIPPING) == [[], [long], [short, long], [short, long], [long], []]
    assert not short.own_tensor_at(2)
    assert short.own_tensor_at(3)


def test_messages_go_straight_to_their_stage_and_hold_each_tensor_once():
    alone = cell_ranges((1, 1, 1, 1, 1), 5)
    assert message_costs(SKIPPING, alone, 0) == [MessageCost(1, 20, 20), MessageCost(4, 7, 0)]
    assert message_costs(SKIPPING, alone, 1) == [MessageCost(2, 40, 40), MessageCost(3, 40, 40)]
    assert message_costs(SKIPPING, alone, 2) == [MessageCost(3, 60, 60)]
    assert message_costs(SKIPPING, alone, 3) == [MessageCost(4, 80, 80)]
    assert message_costs(SKIPPING, alone, 4) == []
    # layers 2 and 3 on one stage: what layer 2 gets is also what layer 3 takes
    together = cell_ranges((2, 2, 1), 5)
    assert message_costs(SKIPPING, together, 0) == [MessageCost(1, 40, 40), MessageCost(2, 7, 0)]
    assert message_costs(SKIPPING, cell_ranges((3, 2), 5), 0) == [MessageCost(1, 60 + 40 + 7, 100)]


def test_a_skip_to_another_cell_of_the_stage_is_no_message():
    """K = 4, two cells a stage: cell 0 gives 7 bytes to cell 4 and 9 to cell 5."""
    near, far = (SkipInput(span, size, size, same_as_output=False) for span, size in ((4, 7), (5, 9)))
    nothing, both = layer(0, 0), layer(7 + 9, 7 + 9)
    costs = [nothing, both, both, both, layer(7 + 9, 7 + 9, near), layer(9, 9, far), nothing, nothing]
    memory = MemoryModel(costs, 12, 8.0).in_partition(cell_ranges((1,) * 8, 8), CellPlacement(4))
    source, near, far = (memory[at] for at in (0, 4, 5))
    assert source.sent == (Sent(4, 7, is_local=True), Sent(5, 9))
    assert (near.input_bytes, near.local_input_bytes, near.sent) == (7, 7, (Sent(-4, 7, is_local=True),))
    assert (far.input_bytes, far.local_input_bytes, far.sent) == (9, 0, (Sent(-5, 9),))
    assert (source.received_gradient_bytes, source.local_gradient_bytes) == (16, 7)


@settings(max_examples=40)
@given(skipping_costs(), st.data())
def test_what_stages_send_each_other_is_what_they_get(costs, data):
    stages = data.draw(st.integers(2, len(costs)))
    cuts = sorted(data.draw(st.permutations(range(1, len(costs))))[: stages - 1])
    edges = [0, *cuts, len(costs)]
    cells = [range(begin, end) for begin, end in pairwise(edges)]
    memory = MemoryModel(costs, 1, 8.0).in_partition(cells, CellPlacement(stages))
    sent = {(k, one.to): one for k in range(stages) for one in message_costs(costs, cells, k)}
    for k in range(stages):
        arriving = [one for (_, to), one in sent.items() if to == k]
        leaving = [one for (source, _), one in sent.items() if source == k]
        activations, gradients = (
            [one.bytes for one in memory[k].sent if one.cells_downstream * direction > 0] for direction in (1, -1)
        )
        assert sum(activations) == sum(one.activation_bytes for one in leaving)
        assert sum(gradients) == sum(one.gradient_bytes for one in arriving)
        assert memory[k].received_gradient_bytes == sum(one.gradient_bytes for one in leaving)
        if k:
            assert memory[k].input_bytes == sum(one.activation_bytes for one in arriving)
