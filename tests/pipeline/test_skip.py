"""Skips: found or refused with every fault, laid out once a tensor, and sent straight to where they are used."""

import re

import pytest
import torch
from torch import nn

from suite.errors import SettingError
from suite.pipeline.boundary import Alive, Front, TensorSpec
from suite.pipeline.fronts import Fronts
from suite.pipeline.skip import Cargo, Routes, Skip, call, find_skips

F32 = torch.float32


def spec(width: int) -> TensorSpec:
    return TensorSpec((2, width), F32, True)


class Part(nn.Module):
    """Adds what it takes to its input; gives its output on, or twice that where ``apart``."""

    def __init__(self, takes=(), gives=(), apart=False):
        super().__init__()
        self.takes, self.gives, self.apart = takes, gives, apart

    def forward(self, x, *skips):
        out = x + sum(skip * (at + 2) for at, skip in enumerate(skips))
        return (out, *[out * 2 if self.apart else out for _ in self.gives])


def test_skips_are_found_in_the_order_in_which_they_are_taken():
    layers = [Part(gives=("a", "b")), Part(gives=("c",)), Part(takes=("b",)), Part(takes=("c", "a"))]
    assert find_skips(layers) == (Skip("b", 0, 2), Skip("c", 1, 3), Skip("a", 0, 3))
    assert find_skips([Part(), Part()]) == ()


def test_all_faults_are_told_at_once():
    layers = [
        Part(takes=("late",), gives=("twice", "lost")),
        Part(takes=("twice",), gives=("late",)),
        Part(takes=("twice", "nowhere"), gives=("lost", "here")),
        Part(takes=("here",), gives=("here",)),
    ]
    with pytest.raises(SettingError) as told:
        find_skips(layers)
    faults = (
        "here is given by layers 2, 3, one may",
        "late is taken by layer 0, which does not come after layer 1 that gives it",
        "lost is given by layers 0, 2, one may",
        "lost is given by layer 0 and taken by none",
        "nowhere is taken by layer 2 and given by none",
        "twice is taken by layers 1, 2, one may",
    )
    for fault in faults:
        assert fault in str(told.value)
    assert str(told.value).count(";") == len(faults)
    with pytest.raises(SettingError, match=re.escape("own is taken by layer 1, which does not come after layer 1")):
        find_skips([Part(), Part(takes=("own",), gives=("own",))])


def test_a_call_takes_from_the_stash_and_gives_to_it():
    x, old = torch.ones(1), torch.tensor([5.0])
    stash = {"old": old, "other": x}
    (out,) = call(Part(takes=("old",), gives=("new",), apart=True), (x,), stash)
    assert out.tolist() == [11.0]
    assert {name: value.tolist() for name, value in stash.items()} == {"other": [1.0], "new": [22.0]}


def test_fronts_say_what_stands_and_what_of_it_is_the_same_tensor():
    layers = [Part(gives=("a",)), Part(gives=("b",), apart=True), Part(takes=("a",)), Part(takes=("b",))]
    first = Front((spec(3),))
    fronts = Fronts(layers).all(first)
    one = spec(3)
    assert fronts == [
        first,
        Front((one,), (Alive("a", one, 0),)),
        Front((one,), (Alive("a", one), Alive("b", one))),
        Front((one,), (Alive("b", one),)),
        Front((one,)),
    ]
    assert [len(front.distinct) for front in fronts] == [1, 1, 3, 2, 1]


def test_a_skip_goes_straight_to_its_stage_and_what_the_next_gets_anyway_is_sent_once():
    # layer       0      1      2      3      4
    # gives       a      b      c
    # takes                     a      b      c    a and c are outputs as well, b is apart
    skips = (Skip("a", 0, 2), Skip("b", 1, 3), Skip("c", 2, 4))
    after_0 = Front((spec(1),), (Alive("a", spec(1), 0),))
    after_1 = Front((spec(2),), (Alive("a", spec(1)), Alive("b", spec(9))))
    alone = [range(k, k + 1) for k in range(5)]
    routes = Routes(skips, alone, 0)
    assert routes.leaving(after_0) == Cargo((spec(1), spec(1)), 1, (("a", 1),), ((1, (0,)), (2, (1,))))
    routes = Routes(skips, alone, 1)
    assert routes.arriving(after_0) == Cargo((spec(1),), 1, (), ((0, (0,)),))
    assert routes.leaving(after_1) == Cargo((spec(2), spec(9)), 1, (("b", 1),), ((2, (0,)), (3, (1,))))
    assert routes.ahead(after_0).skips == (Alive("a", spec(1)),)  # given two stages before the next: not its output
    routes = Routes(skips, alone, 2)
    assert routes.arriving(after_1) == Cargo((spec(2), spec(1)), 1, (("a", 1),), ((0, (1,)), (1, (0,))))
    # with layers 1 and 2 on one stage, a is their input and a skip of theirs: one tensor, two uses
    routes = Routes(skips, [range(1), range(1, 3), range(3, 5)], 1)
    cargo = routes.arriving(after_0)
    assert cargo == Cargo((spec(1),), 1, (("a", 0),), ((0, (0,)),))
    x = torch.zeros(2, 1)
    main, stash = cargo.unpack((x,))
    assert main[0] is x
    assert stash["a"] is x


def test_gradients_go_back_the_same_lanes_without_what_has_none():
    whole = TensorSpec((2,), torch.int64, False)
    cargo = Cargo((whole, spec(1), spec(2)), 2, (("a", 2),), ((0, (2,)), (1, (0, 1))))
    assert cargo.back == ((0, (2,)), (1, (1,)))
