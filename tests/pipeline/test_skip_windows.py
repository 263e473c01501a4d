"""No schedule waits for ever for room of skips' messages, also where each cell gives a skip to every later one."""

import pytest

from suite.pipeline.action import turns_of
from suite.pipeline.recipe import Recipe
from suite.pipeline.transport import WINDOW, outstanding


class Stuck:
    """Plays a schedule as ``transport`` sends: a stage goes on once all but the last few messages of each lane have a
    receive. Messages between cells of one stage are none."""

    def __init__(self, schedule, spare=0):
        self.schedule, self.stages, self.turns = schedule, len(schedule), turns_of(schedule)
        self.count = self.stages * self.turns
        self.unsent = outstanding(self.stages, self.turns) - spare
        self.ran = {kind: [0] * self.count for kind in "FB"}
        self.at = [0] * self.stages
        while any(self.act(k) for k in range(self.stages)):
            pass
        self.left = [k for k, actions in enumerate(schedule) if self.at[k] < len(actions)]

    def peers(self, cell, later):
        return [peer for peer in range(self.count) if (peer > cell if later else peer < cell)]

    def act(self, k):
        """Does a stage's next action; returns whether it could."""
        actions = self.schedule[k]
        if self.at[k] == len(actions):
            return False
        before, action = actions[self.at[k] - 1] if self.at[k] else None, actions[self.at[k]]
        if before is not None and before.kind in "FB" and not self.has_room(before, k):
            return False
        cell, kind = action.turn * self.stages + k, action.kind
        if kind in "FB":
            sources = self.peers(cell, later=kind == "B")
            if any(self.ran[kind][source] <= self.ran[kind][cell] for source in sources):
                return False
            self.ran[kind][cell] += 1
        self.at[k] += 1
        return True

    def has_room(self, action, k):
        cell, kind = action.turn * self.stages + k, action.kind
        for taker in self.peers(cell, later=kind == "F"):
            distance = abs(taker - cell)
            if distance % self.stages == 0:
                continue
            oldest = self.ran[kind][cell] - 1 - (self.unsent + distance - 1)
            if oldest >= 0 and not (self.is_open(taker) and self.ran[kind][taker] > oldest - WINDOW):
                return False
        return True

    def is_open(self, cell):
        k, turn = cell % self.stages, cell // self.stages
        if turn == 0 or self.ran["F"][cell]:
            return True
        return self.at[k] < len(self.schedule[k]) and self.schedule[k][self.at[k]].turn == turn


CASES = [
    *((name, turns) for name in ("interleaved", "zero_bubble") for turns in (2, 3, 4)),
    ("fill_drain", 1), ("1f1b", 1), ("zero_bubble", 1),
]  # fmt: skip


@pytest.mark.parametrize(("name", "turns"), CASES)
@pytest.mark.parametrize("stages", [2, 3, 5, 9])
def test_skips_between_all_cells_find_room(name, turns, stages):
    for micro_batches in {1, stages, stages + 1, 2 * stages + 1, 4 * stages}:
        assert Stuck(Recipe(name, (1,), turns).actions(stages, micro_batches)).left == [], micro_batches


def test_without_room_they_would_not():
    assert Stuck(Recipe("interleaved", (1,), 2).actions(9, 36), spare=6).left
