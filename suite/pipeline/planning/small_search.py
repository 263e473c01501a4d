"""The fastest of all schedules of a small pipeline.

    actions   0     1     2     all schedules grow by one action at a time, in the order of their starts; of those that
              .---- F0 -- F1    have done the same, one that is later in nothing makes the others superfluous, as is one
                    '---- I0    that cannot end in time

At first only those grow that may end soonest; what they find bounds the others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from suite.pipeline.planning.lower_bound import LeastTimes
from suite.pipeline.planning.partial_schedule import EXACT, PartialSchedule, SchedulingProblem

FEWEST_GROWING, MORE_GROWING = 50, 8
"""How many partial schedules of equal progress grow at first, and by which factor more each time."""


def fastest_of_all(problem: SchedulingProblem, below: float, most: int) -> list[PartialSchedule]:
    """Returns schedules that take less than ``below``, the fastest last: the fastest of all, unless ``most`` partial
    ones are too few, or messages on NCCL wait forever in one that made others superfluous."""
    found: list[PartialSchedule] = []
    rest, count, growing, are_all = _LeastRest(problem), 0, FEWEST_GROWING, False
    while not are_all and count < most:
        are_all, begun = True, PartialSchedule(problem)
        waiting = {begun.progress(): {begun.state(): [(begun.times(0.0), 0.0, 0.0, begun)]}}
        while waiting and count < most:
            fronts = waiting.pop(min(waiting)).values()
            ranked = sorted((each for front in fronts for each in front), key=lambda each: (each[1], each[0]))
            are_all = are_all and len(ranked) <= growing
            for _, _, clock, partial in ranked[:growing]:
                for kind, at, start in _next_moves(partial, clock):
                    after = partial.copy()
                    after.run(kind, at, start)
                    count += 1
                    least = rest.least_end(after, start)
                    if least >= below * EXACT:
                        continue
                    if after.is_complete():
                        if after.can_run():
                            found.append(after)
                            below = max(after.free)
                        continue
                    times = after.times(start)
                    front = waiting.setdefault(after.progress(), {}).setdefault(after.state(), [])
                    if any(all(map(float.__le__, other[0], times)) for other in front):
                        continue
                    front[:] = [other for other in front if not all(map(float.__le__, times, other[0]))]
                    front.append((times, least, start, after))
        growing *= MORE_GROWING
    return found


class _LeastRest:
    """The least seconds from what each stage has done to the end of the step, if no message is late: it runs what is
    left to it in its memory, and each action has its tail behind it (``lower_bound``)."""

    def __init__(self, problem: SchedulingProblem) -> None:
        self._times, self._known = LeastTimes(problem), dict[object, float]()

    def least_end(self, partial: PartialSchedule, clock: float) -> float:
        """Returns a time before which the step cannot end, if nothing else starts before the clock."""
        return max(max(free, clock) + self._rest_s(partial, k) for k, free in enumerate(partial.free))

    def _rest_s(self, partial: PartialSchedule, k: int) -> float:
        own = partial.problem.own[k]
        key = k, *(partial.cells[at].state() for at in own)
        if key not in self._known:
            ways = [] if any(not partial.cells[at].is_done() for at in own) else [0.0]
            for kind, at in partial.problem.moves[k]:
                if partial.is_next(kind, at) and partial.fits(kind, at):
                    after = partial.copy()
                    seconds = after.run(kind, at, 0.0)
                    ways.append(seconds + max(self._tail_s(partial, kind, at), self._rest_s(after, k)))
            self._known[key] = min(ways, default=math.inf)
        return self._known[key]

    def _tail_s(self, partial: PartialSchedule, kind: str, at: int) -> float:
        """Returns the least seconds after a cell's next action of a kind."""
        cell, (_, graph, backward, weight_grad) = partial.cells[at], partial.problem.least_s[at]
        if kind in "Ff":
            return self._times.forward_tail[at][-1 - cell.forwards] - (graph if kind == "F" else 0.0)
        if kind == "W":
            return 0.0
        tail = self._times.backward_tail[at][-1 - cell.backwards]
        return tail + {"R": backward, "I": 0.0, "B": -weight_grad}[kind]


def _next_moves(partial: PartialSchedule, clock: float) -> Iterator[tuple[str, int, float]]:
    """Yields kind, cell and start of the actions that may come next: those that start at the clock or later, and before
    which nothing else of their stage would fit in without delay."""
    problem = partial.problem
    for k, moves in enumerate(problem.moves):
        choices, first_end = [], math.inf
        for kind, at in moves:
            start = partial.earliest_start(kind, at)
            if start is not None and partial.fits(kind, at):
                end = start + problem.seconds[kind][at]
                choices.append((kind, at, start, end))
                if kind == "W" or problem.holds_all[k]:
                    first_end = min(first_end, end)
        for kind, at, start, end in choices:
            if start >= clock and (start < first_end or end <= first_end):
                yield kind, at, start
