"""Skips: found or refused with every fault, laid out once a tensor, and sent straight to where they are used."""

import re

import pytest
import torch
from torch import nn

from suite.errors import SettingError
from suite.pipeline.runtime.boundary import CutSpec, OpenSkip, TensorSpec
from suite.pipeline.runtime.shape_inference import ShapeInference
from suite.pipeline.runtime.skip import CellBoundary, Skip, SkipLayout, call, find_skips

F32 = torch.float32


def spec(width: int) -> TensorSpec:
    return TensorSpec((2, width), F32, True)


class Part(nn.Module):
    """Adds what it takes to its input; gives its output on, or twice that where ``apart``."""

    def __init__(self, pops=(), stashes=(), apart=False):
        super().__init__()
        self.gpipe_pops, self.gpipe_stashes, self.apart = pops, stashes, apart

    def forward(self, x, *skips):
        out = x + sum(skip * (at + 2) for at, skip in enumerate(skips))
        return (out, *[out * 2 if self.apart else out for _ in self.gpipe_stashes])


def test_skips_are_found_in_the_order_in_which_they_are_taken():
    layers = [Part(stashes=("a", "b")), Part(stashes=("c",)), Part(pops=("b",)), Part(pops=("c", "a"))]
    assert find_skips(layers) == (Skip("b", 0, 2), Skip("c", 1, 3), Skip("a", 0, 3))
    assert find_skips([Part(), Part()]) == ()


def test_all_faults_are_reported_at_once():
    layers = [
        Part(pops=("late",), stashes=("twice", "lost")),
        Part(pops=("twice",), stashes=("late",)),
        Part(pops=("twice", "nowhere"), stashes=("lost", "here")),
        Part(pops=("here",), stashes=("here",)),
    ]
    with pytest.raises(SettingError) as caught:
        find_skips(layers)
    faults = (
        "here is stashed by layers 2, 3, only one may",
        "late is popped by layer 0, which does not come after layer 1 that stashes it",
        "lost is stashed by layers 0, 2, only one may",
        "lost is stashed by layer 0 and popped by none",
        "nowhere is popped by layer 2 and stashed by none",
        "twice is popped by layers 1, 2, only one may",
    )
    for fault in faults:
        assert fault in str(caught.value)
    assert str(caught.value).count(";") == len(faults)
    with pytest.raises(SettingError, match=re.escape("own is popped by layer 1, which does not come after layer 1")):
        find_skips([Part(), Part(pops=("own",), stashes=("own",))])


def test_a_call_pops_from_the_stash_and_adds_to_it():
    x, old = torch.ones(1), torch.tensor([5.0])
    stash = {"old": old, "other": x}
    (out,) = call(Part(pops=("old",), stashes=("new",), apart=True), (x,), stash)
    assert out.tolist() == [11.0]
    assert {name: value.tolist() for name, value in stash.items()} == {"other": [1.0], "new": [22.0]}


def test_cuts_list_open_skips_and_which_share_a_tensor():
    layers = [Part(stashes=("a",)), Part(stashes=("b",), apart=True), Part(pops=("a",)), Part(pops=("b",))]
    first = CutSpec((spec(3),))
    cuts = ShapeInference(layers).infer_all(first)
    one = spec(3)
    assert cuts == [
        first,
        CutSpec((one,), (OpenSkip("a", one, 0),)),
        CutSpec((one,), (OpenSkip("a", one), OpenSkip("b", one))),
        CutSpec((one,), (OpenSkip("b", one),)),
        CutSpec((one,)),
    ]
    assert [len(cut.distinct_tensors) for cut in cuts] == [1, 1, 3, 2, 1]


def test_a_skip_goes_straight_to_its_stage_and_what_the_next_gets_anyway_is_sent_once():
    # layer       0      1      2      3      4
    # gives       a      b      c
    # takes                     a      b      c    a and c are outputs as well, b is apart
    skips = (Skip("a", 0, 2), Skip("b", 1, 3), Skip("c", 2, 4))
    after_0 = CutSpec((spec(1),), (OpenSkip("a", spec(1), 0),))
    after_1 = CutSpec((spec(2),), (OpenSkip("a", spec(1)), OpenSkip("b", spec(9))))
    alone = [range(k, k + 1) for k in range(5)]
    skip_layout = SkipLayout(skips, alone, 0)
    assert skip_layout.output_boundary(after_0) == CellBoundary(
        (spec(1), spec(1)), 1, (("a", 1),), ((1, (0,)), (2, (1,)))
    )
    skip_layout = SkipLayout(skips, alone, 1)
    assert skip_layout.input_boundary(after_0) == CellBoundary((spec(1),), 1, (), ((0, (0,)),))
    assert skip_layout.output_boundary(after_1) == CellBoundary(
        (spec(2), spec(9)), 1, (("b", 1),), ((2, (0,)), (3, (1,)))
    )
    assert skip_layout.next_cut(after_0).skips == (
        OpenSkip("a", spec(1)),
    )  # given two stages before the next: not its output
    skip_layout = SkipLayout(skips, alone, 2)
    assert skip_layout.input_boundary(after_1) == CellBoundary(
        (spec(2), spec(1)), 1, (("a", 1),), ((0, (1,)), (1, (0,)))
    )
    # with layers 1 and 2 on one stage, a is their input and a skip of theirs: one tensor, two uses
    skip_layout = SkipLayout(skips, [range(1), range(1, 3), range(3, 5)], 1)
    cargo = skip_layout.input_boundary(after_0)
    assert cargo == CellBoundary((spec(1),), 1, (("a", 0),), ((0, (0,)),))
    x = torch.zeros(2, 1)
    main, stash = cargo.unpack((x,))
    assert main[0] is x
    assert stash["a"] is x


def test_gradients_go_back_the_same_lanes_without_what_has_none():
    whole = TensorSpec((2,), torch.int64, False)
    cargo = CellBoundary((whole, spec(1), spec(2)), 2, (("a", 2),), ((0, (2,)), (1, (0, 1))))
    assert cargo.peers_of("gradients") == ((0, (2,)), (1, (1,)))
