"""No schedule waits for ever for room of skips' messages, also where each cell gives a skip to every later one."""

import pytest

from suite.pipeline.schedule.action import virtual_stages_of
from suite.pipeline.schedule.config import ScheduleConfig
from suite.pipeline.schedule.flow_control import flow_control


class Stuck:
    """Plays a schedule as ``transport`` sends: a stage goes on once all but the last few messages of each lane have a
    receive. Messages between cells of one stage are none."""

    def __init__(self, schedule, spare=0):
        self.schedule, self.stages, self.virtual_stages = schedule, len(schedule), virtual_stages_of(schedule)
        self.count = self.stages * self.virtual_stages
        self.flow = flow_control("gloo", self.stages, self.virtual_stages)
        self.unsent = self.flow.max_inflight_sends - spare
        self.ran = {direction: [0] * self.count for direction in (1, -1)}
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
        if before is not None and before.direction and not self.has_room(before, k):
            return False
        cell, direction = action.virtual_stage * self.stages + k, action.direction
        if direction:
            sources = self.peers(cell, later=direction < 0)
            if any(self.ran[direction][source] <= self.ran[direction][cell] for source in sources):
                return False
            self.ran[direction][cell] += 1
        self.at[k] += 1
        return True

    def has_room(self, action, k):
        cell, direction = action.virtual_stage * self.stages + k, action.direction
        for taker in self.peers(cell, later=direction > 0):
            distance = abs(taker - cell)
            if distance % self.stages == 0:
                continue
            oldest = self.ran[direction][cell] - 1 - (self.unsent + distance - 1)
            posted = self.ran[direction][taker] + self.flow.recvs_ahead(direction)
            if oldest >= 0 and not (self.is_open(taker) and posted > oldest):
                return False
        return True

    def is_open(self, cell):
        k, virtual_stage = cell % self.stages, cell // self.stages
        if virtual_stage == 0 or self.ran[1][cell]:
            return True
        return self.at[k] < len(self.schedule[k]) and self.schedule[k][self.at[k]].virtual_stage == virtual_stage


CASES = [
    *((name, virtual_stages) for name in ("interleaved", "zero_bubble") for virtual_stages in (2, 3, 4)),
    ("fill_drain", 1), ("1f1b", 1), ("zero_bubble", 1),
]  # fmt: skip


@pytest.mark.parametrize(("name", "virtual_stages"), CASES)
@pytest.mark.parametrize("stages", [2, 3, 5, 9])
def test_skips_between_all_cells_find_room(name, virtual_stages, stages):
    for micro_batches in {1, stages, stages + 1, 2 * stages + 1, 4 * stages}:
        assert Stuck(ScheduleConfig(name, (1,), virtual_stages).actions(stages, micro_batches)).left == [], (
            micro_batches
        )


def test_without_room_they_would_not():
    assert Stuck(ScheduleConfig("interleaved", (1,), 2).actions(9, 36), spare=6).left
