"""Searches the fastest schedule of given cells in given memory.

    policies: limits and priorities -> climb: change one, keep what is not slower -> small pipelines: all schedules

A policy plays all stages: a free stage runs the first action in its order of priority that its limits, its messages and
its memory allow. A policy is given up when it can no longer be the fastest. The climb begins in a family: run-ahead
limits in multiples of what fills the pipeline, as 1F1B has them, graphs kept or recomputed, backwards or forwards
first, the later or the earlier cell first. There it improves one choice at a time. For small pipelines all schedules
are tried (``small_search``).

All work is counted, so a seed finds the same schedule on every machine.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import product
from typing import Any

from suite.errors import SettingError
from suite.pipeline.planning.lower_bound import lower_bound_s
from suite.pipeline.planning.partial_schedule import EXACT, PartialSchedule, SchedulingProblem
from suite.pipeline.planning.simulate import simulate
from suite.pipeline.planning.small_search import fastest_of_all
from suite.pipeline.planning.stage_memory import peak_bytes
from suite.pipeline.schedule.action import Schedule

ACTIONS_PER_S, PARTIAL_SCHEDULES_PER_S = 100_000, 25_000
"""The work of a second: on one core of 2020, actions of policies, and partial schedules of small pipelines."""

MAX_POLICIES = 400
"""Tried to their end; many more are given up before."""
SMALL_CELLS, SMALL_MICRO_BATCHES = 6, 3
"""The largest pipeline whose schedules are all tried, with two cells per stage at most."""

_PATIENCE = (0.0, 0.1, 0.3, 0.5, 0.8, 1.0)


def search(
    problem: SchedulingProblem, starts: Sequence[Schedule] = (), seconds: float = 10.0, seed: int = 0
) -> Schedule | None:
    """Returns the fastest schedule found that ``validate`` accepts and that fits the problem's memory, by the step time
    of ``simulate``; None if none is found. It is never slower than any of ``starts`` that fits. Each cell takes its
    micro-batches in order.

    Policies and partial schedules are tried for ``seconds`` at the rates above; the clock is not read. Raises
    SettingError for no time.
    """
    if seconds <= 0:
        raise SettingError(f"the search for a schedule has {seconds} s; it needs more than 0")
    costs, micro_batches, cell_to_stage = problem.costs, problem.micro_batches, problem.placement.cell_to_stage

    def step_s(schedule: Schedule) -> float:
        return simulate(schedule, costs, problem.links, problem.flow, cell_to_stage).seconds

    def fits(schedule: Schedule) -> bool:
        stages = zip(schedule, problem.stage_memory, strict=True)
        return all(peak_bytes(actions, *cells, flow=problem.flow) <= problem.limit_bytes for actions, cells in stages)

    if not fits([[] for _ in problem.own]):  # the update alone needs more
        return None
    best = min((start for start in starts if fits(start)), key=step_s, default=None)
    bound = lower_bound_s(problem)
    most = min(int(seconds * ACTIONS_PER_S), MAX_POLICIES * 3 * len(costs) * micro_batches)
    found = _climb(problem, bound, max(1, most), random.Random(seed))
    if found and not found[-1].can_run():  # it may have led the climb astray
        found = _climb(problem, bound, max(1, most), random.Random(seed), can_run=True)
    below = min(max(found[-1].free) if found else math.inf, step_s(best) if best else math.inf)
    is_small = len(costs) <= min(SMALL_CELLS, 2 * problem.placement.stages) and micro_batches <= SMALL_MICRO_BATCHES
    if below * EXACT > bound and is_small:
        found += fastest_of_all(problem, below, int(seconds * PARTIAL_SCHEDULES_PER_S))
    if not found:
        return best
    schedule = found[-1].schedule()
    assert fits(schedule), "what a partial schedule holds is what its stages need"
    return schedule if best is None or step_s(schedule) < step_s(best) else best


@dataclass(frozen=True, slots=True)
class _Policy:
    """How free stages choose their next action; numbers of micro-batches for each cell, but for the last three."""

    ahead: tuple[int, ...]
    """How far forwards may run ahead of backwards."""
    graphs: tuple[int, ...]
    """The most graphs that are kept at once."""
    first_split: tuple[int, ...]
    """How many backwards at the beginning defer their weight gradients."""
    last_split: tuple[int, ...]
    """How many at the end do."""
    order: tuple[tuple[tuple[str, int], ...], ...]
    """Of each stage: kinds and cells, the first choice first."""
    drops: bool = False
    """Whether a forward whose graph has no room runs without, to be recomputed; else it waits for room."""
    patience: float = 0.1
    """The share of an action's time for which a stage rather waits for a better choice that it knows will come."""


def _family(problem: SchedulingProblem) -> dict[str, list[Any]]:
    """Returns the values of each argument of ``_policy`` that are worth trying, the likeliest first."""
    is_tight = not all(problem.holds_all)
    keeps = ["all", "what fits", "nothing"] if is_tight and problem.may_recompute else ["all"]
    has_many = any(len(own) > 1 for own in problem.own)
    return {
        "fill_and_keep": list(product((1.5, 1.0, 2.0, 3.0, 0.75, 0.5, 0.25), keeps)),
        "split": ["all", "last", "first and last"] if any(cost.split_s for cost in problem.costs) else ["all"],
        "backwards_first": [True, False],
        "step": [1, -1] if has_many else [1],
        "weights_first": [False, True] if is_tight else [False],
    }


def _policy(
    problem: SchedulingProblem,
    fill_and_keep: tuple[float, str],
    split: str,
    backwards_first: bool,
    step: int,
    weights_first: bool,
) -> _Policy:
    """Returns a policy of the family: forwards run ahead ``fill`` times as far as fills the pipeline, and keep their
    graphs; ``_order`` has the rest."""
    (fill, keep), count, cells = fill_and_keep, problem.micro_batches, range(len(problem.cell_to_stage))
    forward, backward, deferred = (problem.seconds[kind] for kind in "FIW")
    period = max(sum(forward[at] + backward[at] + deferred[at] for at in own) for own in problem.own)
    trips = [sum(forward[at:]) + sum(backward[at:]) for at in cells]
    drains = tuple(min(count, math.ceil(sum(backward[:at]) / deferred[at])) if deferred[at] else 0 for at in cells)
    ahead = tuple(max(1, min(count, math.ceil(fill * trip / (period or 1.0) * EXACT))) for trip in trips)
    every, none = (count,) * len(cells), (0,) * len(cells)
    first, last = {"all": (every, every), "last": (none, drains), "first and last": (drains, drains)}[split]
    order = tuple(_order(own, backwards_first, step, weights_first) for own in problem.own)
    return _Policy(ahead, none if keep == "nothing" else every, first, last, order, keep == "what fits")


def _order(own: Sequence[int], backwards_first: bool, step: int, weights_first: bool) -> tuple[tuple[str, int], ...]:
    """Returns the order of a stage's choices; with a ``step`` of 1 backwards of its earlier cells and forwards of its
    later ones first."""
    backwards, forwards = [("B", at) for at in own[::step]], [("F", at) for at in own[::-step]]
    choices = backwards + forwards if backwards_first else forwards + backwards
    recomputes, weights = [("R", at) for at in own], [("W", at) for at in own]
    return (*weights, *choices, *recomputes) if weights_first else (*choices, *recomputes, *weights)


def _changed(policy: _Policy, micro_batches: int, rng: random.Random) -> _Policy:
    """Returns a policy that differs in one choice, of one cell or stage or of all."""
    name = rng.choice(
        ("ahead", "ahead", "ahead", "order", "order", "patience", "drops", "graphs", "first_split", "last_split")
    )
    if name == "drops":
        return replace(policy, drops=not policy.drops)
    if name == "patience":
        return replace(policy, patience=rng.choice(_PATIENCE))
    values = getattr(policy, name)
    one = rng.randrange(len(values))
    chosen = [one] if rng.random() < 0.6 else range(len(values))
    if name == "order":
        source, target = (rng.randrange(len(values[one])) for _ in range(2))

        def moved(choices: tuple[tuple[str, int], ...]) -> tuple[tuple[str, int], ...]:
            rest = [*choices[:source], *choices[source + 1 :]]
            return (*rest[:target], choices[source], *rest[target:])

        return replace(policy, order=tuple(moved(own) if k in chosen else own for k, own in enumerate(values)))
    least, step, jump = (1 if name == "ahead" else 0), rng.choice((-2, -1, 1, 2)), rng.randint(0, micro_batches)
    jumps = rng.random() < (0.0 if name == "ahead" else 0.5)
    changed = tuple(
        max(least, min(micro_batches, jump if jumps else value + step)) if at in chosen else value
        for at, value in enumerate(values)
    )
    return replace(policy, **{name: changed})  # type: ignore[arg-type]


def _climb(
    problem: SchedulingProblem, bound: float, most: int, rng: random.Random, can_run: bool = False
) -> list[PartialSchedule]:
    """Returns the schedules of better and better policies, the best one last; tries about ``most`` actions. With
    ``can_run`` it passes by those in which messages wait forever, which takes longer."""
    improvements: list[PartialSchedule] = []
    best, left = (math.inf, math.inf), most

    def goes_on() -> bool:
        """Whether work is left, and the bound leaves room for a faster schedule."""
        return left > 0 and best[0] * EXACT > bound

    def is_no_slower(policy: _Policy) -> bool:
        """Plays a policy; returns whether it is not slower than the fastest so far."""
        nonlocal best, left
        partial, actions = _played(problem, policy, best[0])
        left -= max(1, actions)
        if partial is None:
            return False
        score = max(partial.free), sum(partial.free)  # of equal steps the one with more free time at the end
        if score > best:
            return False
        if score < best:
            if can_run and not partial.can_run():
                return False
            improvements.append(partial)
        best = score
        return True

    family, kept = _family(problem), None
    chosen = {name: values[0] for name, values in family.items()}
    for name, values in [*family.items()] * 2:
        for value in values:
            if goes_on() and (kept is None or value != chosen[name]):
                tried = _policy(problem, **{**chosen, name: value})
                if is_no_slower(tried):
                    kept, chosen[name] = tried, value
    while kept is not None and goes_on():
        tried = _changed(kept, problem.micro_batches, rng)
        if is_no_slower(tried):
            kept = tried
    return improvements


def _played(problem: SchedulingProblem, policy: _Policy, below: float) -> tuple[PartialSchedule | None, int]:
    """Returns the schedule of a policy, and how many actions were tried. The schedule is None if all stages wait for
    memory that nothing frees, or if it cannot take less than ``below``."""
    partial, actions = PartialSchedule(problem), 0
    events = [(0.0, k) for k in range(problem.placement.stages)]
    while events:
        now, k = heappop(events)
        if now < partial.free[k]:
            continue
        kind, at, time = _choice(partial, policy, k, now)
        if kind:
            end = partial.run(kind, at, now)
            actions += 1
            if actions % (4 * len(problem.cell_to_stage)) == 0 and partial.least_end(now) > below:
                return None, actions
            heappush(events, (end, k))
            direction = 1 if kind in "Ff" else -1
            for receiver in problem.receivers[direction][at] if kind not in "RW" else ():
                heappush(events, (end, receiver))
        elif time < math.inf:
            heappush(events, (time, k))
    return partial if partial.is_complete() else None, actions


def _choice(partial: PartialSchedule, policy: _Policy, k: int, now: float) -> tuple[str, int, float]:
    """Returns kind and cell of a free stage's next action; an empty kind if it has none before some later time."""
    known = math.inf
    for kind, at in policy.order[k]:
        cell = partial.cells[at]
        if kind == "F" and cell.forwards - cell.backwards >= policy.ahead[at]:
            continue
        start = partial.earliest_start(kind, at)
        if start is None:
            continue
        if start > now:
            known = min(known, start)
            continue
        if known - now < policy.patience * partial.problem.seconds[kind][at]:
            continue
        kinds = kind
        if kind == "F":
            kinds = ("Ff" if policy.drops else "F") if cell.graphs < policy.graphs[at] else "f"
            kinds = kinds if partial.problem.may_recompute else "F"
        elif kind == "B":
            last = partial.problem.micro_batches - cell.backwards <= policy.last_split[at]
            kinds = "IB" if last or cell.backwards < policy.first_split[at] else "BI"
        for each in kinds:
            if partial.fits(each, at, leaves_room=each in "FfR"):
                return each, at, now
    return "", 0, known
