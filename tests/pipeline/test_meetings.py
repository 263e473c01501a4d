"""Who meets whom before the first mini-batch: every one blocks until the other is there, and nobody waits for ever."""

import pytest

from suite.pipeline.skip import Routes, Skip
from suite.pipeline.transport import meetings


def played(stages, turns, skips=()):
    """Returns what is left to meet when no two workers wait for each other any more."""
    cells = [range(at, at + 1) for at in range(stages * turns)]
    lists = []
    for k in range(stages):
        mine = [(at, Routes(skips, cells, at)) for at in range(k, stages * turns, stages)]
        lists.append(list(meetings(mine)))
    while True:
        heads = {k: todo[0] for k, todo in enumerate(lists) if todo}
        pairs = [
            (k, other)
            for k, (kind, giver, taker, sends) in heads.items()
            for other in ((taker if sends else giver) % stages,)
            if heads.get(other) == (kind, giver, taker, not sends)
        ]
        if not pairs:
            return [todo for todo in lists if todo]
        for k in set(pairs[0]):
            lists[k].pop(0)


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
@pytest.mark.parametrize("turns", [1, 2, 3, 4])
def test_all_meet(stages, turns):
    assert played(stages, turns) == []


def test_so_do_those_that_a_skip_connects():
    assert played(4, 1, (Skip("a", 0, 2), Skip("b", 0, 3), Skip("c", 1, 3))) == []
