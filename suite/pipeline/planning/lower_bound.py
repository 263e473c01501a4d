"""A lower bound of a step's time, for any schedule of given cells in given memory.

    time      0     head               T - tail   T      head: no micro-batch can be here sooner
    stage k   |      F F F F I F I F I W I |W W W |      tail: what must follow on other stages
    memory    |      |== 0 ==|== 2 ==|     |      |      so many micro-batches fit at once, and none leaves before its
              |        |== 1 ==|== 3 ==|   |      |      round trip through the later cells

The actions of a stage run one at a time, each not before its head and with its tail behind it. If they could be
interrupted, the longest tail first would be optimal (Jackson, 1955); Carlier (1982) bounds a machine of a job shop so.
The graphs that are kept, each for its round trip, fit the memory over the step; a micro-batch whose graph is not kept
costs another forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from heapq import heappop, heappush
from itertools import accumulate

from suite.pipeline.model.cells import CellPlacement
from suite.pipeline.planning.simulate import CellCost, Link, Links
from suite.pipeline.planning.stage_memory import CellMemory


def lower_bound_s(
    placement: CellPlacement,
    micro_batches: int,
    costs: Sequence[CellCost],
    links: Link | Links,
    memory: Sequence[Sequence[CellMemory]],
    limit_bytes: int,
) -> float:
    """Returns a lower bound in seconds of ``simulate`` without the update, over all lists of actions that ``validate``
    accepts on this placement, in any order of micro-batches, with any recomputes, ``B`` or ``I`` and ``W``, whose
    ``stage_memory.peak_bytes`` are at most ``limit_bytes`` on every stage."""
    times = _LeastTimes(placement, micro_batches, costs, links)
    bounds = []
    for k in range(placement.stages):
        own = placement.on_stage(k, range(len(costs)))
        bounds.append(max(_preemptive_s(times.actions(own)), _memory_bound_s(times, own, memory[k], limit_bytes)))
    return max(bounds)


class _LeastTimes:
    """The least seconds of each cell's actions, before them (head) and after them (tail), by number.

    Number i is the i-th to come, or from the end the i-th last, whichever micro-batch it is.
    """

    def __init__(
        self, placement: CellPlacement, micro_batches: int, costs: Sequence[CellCost], links: Link | Links
    ) -> None:
        cells, last, self.numbers = range(len(costs)), len(costs) - 1, range(micro_batches)
        self.costs = costs
        self.forward = [min(cost.forward_s, cost.recompute_s) for cost in costs]
        self.graph = [cost.recompute_s - least for cost, least in zip(costs, self.forward, strict=True)]
        self.backward = [min(cost.backward_s, cost.seconds("I", False)) for cost in costs]
        self.weight_grad = [cost.backward_s - least for cost, least in zip(costs, self.backward, strict=True)]

        def message_s(source: int, target: int, size: int) -> float:
            if not placement.crosses(source, target):
                return 0.0
            ends = placement.stage_of(source), placement.stage_of(target)
            return (links.between(*ends) if isinstance(links, Links) else links).seconds(size)

        there = [message_s(at, at + 1, costs[at].activation_bytes) for at in cells[:-1]]
        back = [message_s(at + 1, at, costs[at + 1].gradient_bytes) for at in cells[:-1]]
        self.round_trip = [0.0] * len(costs)
        """From the end of a forward to the end of its backward."""
        for at in reversed(cells):
            later = there[at] + self.forward[at + 1] + self.round_trip[at + 1] + back[at] if at < last else 0.0
            self.round_trip[at] = max(self.graph[at], later) + self.backward[at]
        self.forward_head: list[list[float]] = []
        self.backward_tail: list[list[float]] = []
        for at in cells:
            came = [head + self.forward[at - 1] + there[at - 1] for head in self.forward_head[-1]] if at else None
            self.forward_head.append(self._in_turn(came, self.forward[at]))
            left = [tail + self.backward[at - 1] + back[at - 1] for tail in self.backward_tail[-1]] if at else None
            own_tail = [self.weight_grad[at] * (i + 1) + self.backward[at] * i for i in self.numbers]
            self.backward_tail.append(self._in_turn(_later(left, own_tail), self.backward[at]))
        self.backward_head: dict[int, list[float]] = {}
        self.forward_tail: dict[int, list[float]] = {}
        for at in reversed(cells):
            own_stage = [cell for cell in cells if placement.stage_of(cell) == placement.stage_of(at)]
            ready = [head + self.forward[at] + self.graph[at] for head in self.forward_head[at]]
            first = self.forward_head[own_stage[0]][0]
            all_forwards = sum(self.forward[cell] for cell in own_stage)
            later_back = sum(self.backward[cell] for cell in own_stage if cell > at)
            # before number i returns, this stage has run as many forwards, and the later cells' backwards
            worked = [first + (i + 1) * (all_forwards + later_back) + i * self.backward[at] for i in self.numbers]
            came = (
                [head + self.backward[at + 1] + back[at] for head in self.backward_head[at + 1]] if at < last else None
            )
            self.backward_head[at] = self._in_turn(_later(_later(came, ready), worked), self.backward[at])
            used = [self.graph[at] + self.backward[at] + tail for tail in self.backward_tail[at]]
            left = (
                [tail + self.forward[at + 1] + there[at] for tail in self.forward_tail[at + 1]] if at < last else None
            )
            self.forward_tail[at] = self._in_turn(_later(left, used), self.forward[at])

    def _in_turn(self, arrivals: Sequence[float] | None, seconds: float) -> list[float]:
        """Returns when each starts, one after the other."""
        return list(accumulate(arrivals or [0.0 for _ in self.numbers], lambda start, at: max(start + seconds, at)))

    def actions(self, own: Sequence[int]) -> list[tuple[float, float, float]]:
        """Returns head, seconds and tail of each action of a stage."""
        actions = []
        for at in own:
            for i in self.numbers:
                forward, backward = self.forward_head[at][i], self.backward_head[at][i]
                tail = self.backward_tail[at][-1 - i]
                actions += [
                    (forward, self.forward[at], self.forward_tail[at][-1 - i]),
                    (forward + self.forward[at], self.graph[at], self.backward[at] + tail),
                    (backward, self.backward[at], tail),
                    (backward + self.backward[at], self.weight_grad[at], 0.0),
                ]
        return actions


def _later(one: Sequence[float] | None, other: Sequence[float]) -> list[float]:
    return list(map(max, one or other, other))


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


def _memory_bound_s(times: _LeastTimes, own: Sequence[int], memory: Sequence[CellMemory], limit_bytes: int) -> float:
    """Returns the least time in which a stage runs its actions and the recomputes that its memory forces."""
    count, first = len(times.numbers), own[0]
    both = sum(times.forward[at] + times.graph[at] + times.backward[at] for at in own)
    deferred = sum(times.weight_grad[at] for at in own)
    busy = times.forward_head[first][0] + count * both + max(times.backward_tail[first][0], count * deferred)
    low, high = busy, busy + count * sum(times.costs[at].forward_s for at in own)
    room = _room_for_graphs(memory, limit_bytes)
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        if busy + _recomputes_s(times, own, memory, room, middle) > middle:
            low = middle
        else:
            high = middle
    return low


def _room_for_graphs(memory: Sequence[CellMemory], limit_bytes: int) -> int:
    """Returns the most bytes of inputs and graphs of a stage. The most that it ever holds is still there while its next
    backward runs; other cells may not have made their gradients yet."""
    always = sum(cell.fixed_bytes + cell.far_message_bytes - cell.gradient_bytes for cell in memory)
    backward = min(
        cell.backward_peak_bytes + cell.received_gradient_bytes + min(cell.gradient_bytes, cell.made_gradient_bytes)
        for cell in memory
    )
    return max(0, limit_bytes - always - backward)


def _recomputes_s(
    times: _LeastTimes, own: Sequence[int], memory: Sequence[CellMemory], room: int, step_s: float
) -> float:
    """Returns the least seconds of forwards that a stage runs again in a step, because its memory does not hold all
    graphs for as long as they are needed; infinite if the inputs alone take too much."""
    count, first = len(times.numbers), own[0]
    window = step_s - times.forward_head[first][0] - times.forward[first] - times.backward_tail[first][0]
    least = [count - _most_kept(times, at, cell, room, step_s) for at, cell in zip(own, memory, strict=True)]
    seconds = [times.costs[at].forward_s for at in own]
    sizes = tuple(cell.input_bytes + cell.activation_bytes for cell in memory)
    trips = [times.round_trip[at] for at in own]
    # only kept micro-batches, which fill the memory in whole graphs; then all micro-batches
    kept = [trip * size for trip, size in zip(trips, sizes, strict=True)]
    freed = [
        cell.activation_bytes * (trip - times.backward[at]) for at, cell, trip in zip(own, memory, trips, strict=True)
    ]
    recomputes = 0.0
    for saved, held in (kept, _fullest(room, sizes, count)), (freed, room):
        excess = sum(count * each for each in kept) - held * max(0.0, window)
        excess -= sum(number * each for number, each in zip(least, saved, strict=True))
        total = sum(number * each for number, each in zip(least, seconds, strict=True))
        for at in sorted((at for at in range(len(own)) if saved[at] > 0), key=lambda at: seconds[at] / saved[at]):
            more = min(max(0.0, excess / saved[at]), count - least[at])
            excess -= more * saved[at]
            total += more * seconds[at]
        recomputes = max(recomputes, total if excess <= 1e-6 * sum(kept) * count else float("inf"))
    return recomputes


def _most_kept(times: _LeastTimes, at: int, cell: CellMemory, room: int, step_s: float) -> int:
    """Returns how many graphs of a cell can be kept in a step if its stage had no other: each of as many as fit at once
    follows another when that has made its round trip, and they come and leave one by one."""
    count, size = len(times.numbers), cell.input_bytes + cell.activation_bytes
    if not size or not times.round_trip[at]:
        return count
    usable = step_s - times.forward_head[at][0] - times.forward[at] - times.backward_tail[at][0]
    apart = times.forward[at] + times.backward[at]
    seconds = sum(max(0.0, usable - apart * number) for number in range(min(count, room // size)))
    return min(count, int(seconds / times.round_trip[at] + 1e-6))


@lru_cache(maxsize=1024)
def _fullest(room: int, sizes: tuple[int, ...], count: int) -> int:
    """Returns the most bytes of whole graphs that fit."""
    if not sizes:
        return 0
    most = min(count, room // sizes[0]) if sizes[0] else 0
    return max(number * sizes[0] + _fullest(room - number * sizes[0], sizes[1:], count) for number in range(most + 1))
