"""A lower bound of a step's time, for any schedule of given cells.

    time      0     head               T - tail   T      head: no micro-batch can be here sooner
    stage k   |      F F F F I F I F I W I |W W W |      tail: what must follow on other stages

The actions of a stage run one at a time, each not before its head and with its tail behind it. If they could be
interrupted, the longest tail first would be optimal (Jackson, 1955); Carlier (1982) bounds a machine of a job shop so.
Memory is not counted: where it forces recomputes, the bound may be far below any schedule that fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import accumulate

from suite.pipeline.planning.policies import CellsProblem


def lower_bound_s(problem: CellsProblem) -> float:
    """Returns a lower bound in seconds of ``simulate`` without the update, over all lists of actions that ``validate``
    accepts on this placement, in any order of micro-batches, with any recomputes, ``B`` or ``I`` and ``W``."""
    times = _LeastTimes(problem)
    return max(_preemptive_s(times.actions(own)) for own in problem.own)


class _LeastTimes:
    """The least seconds before each cell's actions (head) and after them (tail), by number: i is the i-th to come, or
    from the end the i-th last, whichever micro-batch it is."""

    def __init__(self, problem: CellsProblem) -> None:
        costs, micro_batches = problem.costs, problem.micro_batches
        cells, last = range(len(costs)), len(costs) - 1
        self.least = [cost.least_seconds for cost in costs]
        there = [problem.message_s(at, at + 1, costs[at].activation_bytes) for at in cells[:-1]]
        back = [problem.message_s(at + 1, at, costs[at + 1].gradient_bytes) for at in cells[:-1]]
        self.forward_head, self.backward_tail, self.backward_head, self.forward_tail = (
            [[0.0] * micro_batches for _ in costs] for _ in range(4)
        )
        for at, (forward, _, backward, weight_grad) in enumerate(self.least):
            came, left = self.forward_head[at], [weight_grad * (i + 1) + backward * i for i in range(micro_batches)]
            if at:
                came = [head + self.least[at - 1][0] + there[at - 1] for head in self.forward_head[at - 1]]
                before = [tail + self.least[at - 1][2] + back[at - 1] for tail in self.backward_tail[at - 1]]
                left = list(map(max, left, before))
            self.forward_head[at], self.backward_tail[at] = _in_turn(came, forward), _in_turn(left, backward)
        for at in reversed(cells):
            forward, graph, backward, _ = self.least[at]
            own = problem.own[problem.placement.stage_of(at)]
            # before number i returns, its stage has run as many forwards, and backwards of its later cells
            worked = sum(self.least[cell][0] for cell in own) + sum(self.least[cell][2] for cell in own if cell > at)
            first = self.forward_head[own[0]][0]
            ready = [
                max(head + forward + graph, first + (i + 1) * worked + i * backward)
                for i, head in enumerate(self.forward_head[at])
            ]
            used = [graph + backward + tail for tail in self.backward_tail[at]]
            if at < last:
                returned = [head + self.least[at + 1][2] + back[at] for head in self.backward_head[at + 1]]
                passed = [tail + self.least[at + 1][0] + there[at] for tail in self.forward_tail[at + 1]]
                ready, used = list(map(max, ready, returned)), list(map(max, used, passed))
            self.backward_head[at], self.forward_tail[at] = _in_turn(ready, backward), _in_turn(used, forward)

    def actions(self, own: Sequence[int]) -> list[tuple[float, float, float]]:
        """Returns head, seconds and tail of each action of a stage."""
        actions = []
        for at in own:
            forward, graph, backward, weight_grad = self.least[at]
            for i, (begin, back) in enumerate(zip(self.forward_head[at], self.backward_head[at], strict=True)):
                tail = self.backward_tail[at][-1 - i]
                actions += [
                    (begin, forward, self.forward_tail[at][-1 - i]),
                    (begin + forward, graph, backward + tail),
                    (back, backward, tail),
                    (back + backward, weight_grad, 0.0),
                ]
        return actions


def _in_turn(arrivals: Sequence[float], seconds: float) -> list[float]:
    """Returns when each starts, one after the other."""
    return list(accumulate(arrivals, lambda start, arrival: max(start + seconds, arrival)))


def _preemptive_s(actions: Sequence[tuple[float, float, float]]) -> float:
    """Returns the least time of actions of (head, seconds, tail) on one stage, if they could be interrupted."""
    bound = now = 0.0
    waiting: list[tuple[float, float]] = []
    arrivals = sorted(actions)
    for number, (head, seconds, tail) in enumerate(arrivals):
        now = max(now, head)
        heappush(waiting, (-tail, seconds))
        until = arrivals[number + 1][0] if number + 1 < len(arrivals) else float("inf")
        while waiting and now < until:
            longest, left = heappop(waiting)
            run = min(left, until - now)
            now += run
            if run < left:
                heappush(waiting, (longest, left - run))
            else:
                bound = max(bound, now - longest)
    return bound
