"""Weights are the same bits for every K, and for every schedule that adds micro-batches in the same order."""

from tests.slow.bits import CASES, weights_after


def test_weights_depend_on_the_order_of_sums_alone():
    found: dict[bool, set[str]] = {True: set(), False: set()}
    for stages, config in CASES:
        found[config.schedule == "fill_drain"].add(weights_after(stages, config))
    assert len(found[True]) == len(found[False]) == 1
    assert len(found[True] | found[False] | {weights_after(*CASES[0], steps=0)}) == 3
