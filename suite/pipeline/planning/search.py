"""The fastest schedule of given cells in given memory, of those that policies make.

    a family of about thirty policies: one choice is varied at a time, and kept where the step is shorter
      -> climb, for one cut of the layers: change a policy at random, keep what is not slower

All work is counted, so equal costs give the same schedule on every machine.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from suite.pipeline.planning.policies import CellsProblem, Policy, PolicyPlayer
from suite.pipeline.planning.simulate import seconds_of
from suite.pipeline.schedule.action import Schedule

EXACT = 1 - 1e-9
"""Times closer than this factor count as equal: they may be rounded sums of the same seconds."""

ACTIONS_WITHOUT_GAIN = 60_000
"""After so many actions without a shorter step a climb ends; 240,000 more would save at most 0.1% of it (measured)."""


class Search:
    """The fastest policy so far, for given cells."""

    def __init__(self, problem: CellsProblem, bound_s: float) -> None:
        """A search that finds a step of ``bound_s`` is content with it."""
        self.problem, self._bound_s = problem, bound_s
        self.best: tuple[Policy, PolicyPlayer] | None = None
        """The policy, and its schedule as it was played; None if no policy makes one."""

    def try_family(self) -> None:
        """Plays the policies of the family."""
        family = _family(self.problem)
        chosen = {name: values[0] for name, values in family.items()}
        for name, values in [*family.items()] * 2:
            for value in values:
                changed = {**chosen, name: value}
                if self._is_content():
                    return
                if self.best is not None and not self.best[1].was_refused and changed["fill_and_keep"][1] != "all":
                    continue  # memory is enough for all graphs
                if (self.best is None or changed != chosen) and self._play(_policy(self.problem, **changed))[0]:
                    chosen = changed

    def climb(self) -> None:
        """Changes the best policy at random, and keeps what is not slower."""
        rng, without_gain = random.Random(0), 0
        while self.best is not None and without_gain < ACTIONS_WITHOUT_GAIN and not self._is_content():
            before_s = self.best[1].step_s
            actions = self._play(_changed(self.best[0], self.problem.micro_batches, rng))[1]
            without_gain = 0 if self.best[1].step_s < EXACT * before_s else without_gain + actions

    def _is_content(self) -> bool:
        return self.best is not None and self.best[1].step_s * EXACT <= self._bound_s

    @property
    def step_s(self) -> float:
        """The seconds of the shortest step, with the longest update."""
        assert self.best is not None
        updates = [sum(self.problem.costs[cell].update_s for cell in own) for own in self.problem.own]
        return self.best[1].step_s + max(updates)

    def schedule(self) -> Schedule:
        """Returns the schedule of the shortest step."""
        assert self.best is not None
        return self.best[1].play.schedule()

    def _play(self, policy: Policy) -> tuple[bool, int]:
        """Plays a policy; returns whether it is kept, because none was faster, and how many actions it took."""
        below_s = math.inf if self.best is None else self.best[1].step_s / EXACT
        player = PolicyPlayer(self.problem, policy, below_s)
        is_kept = player.step_s < math.inf and (self.best is None or player.score <= self.best[1].score)
        if is_kept:
            self.best = policy, player
        return is_kept, 1 + sum(map(len, player.play.rows))


def _family(problem: CellsProblem) -> dict[str, list[Any]]:
    """Returns the values of each argument of ``_policy`` that are worth trying, the likeliest first."""
    keeps = ["all", "what fits", "nothing"] if problem.may_recompute else ["all"]
    has_many, splits = len(problem.own[0]) > 1, any(cost.weight_grad_s for cost in problem.costs)
    return {
        "fill_and_keep": list(product((1.5, 1.0, 2.0, 3.0, 0.75, 0.5, 0.25), keeps)),
        "split": ["all", "last", "first and last"] if splits else ["all"],
        "backwards_first": [True, False],
        "step": [1, -1] if has_many else [1],
        "weights_first": [False, True] if splits else [False],
        "patience": [0.1, 0.0, 0.3],
    }


def _policy(
    problem: CellsProblem,
    fill_and_keep: tuple[float, str],
    split: str,
    backwards_first: bool,
    step: int,
    weights_first: bool,
    patience: float,
) -> Policy:
    """Returns a policy of the family: forwards run ahead ``fill`` times as far as fills the pipeline, and keep their
    graphs; ``_order`` has the rest."""
    (fill, keep), count, cells = fill_and_keep, problem.micro_batches, range(len(problem.costs))
    forward, backward, deferred = (seconds_of(problem.costs)[kind] for kind in "FIW")
    period = max(sum(forward[at] + backward[at] + deferred[at] for at in own) for own in problem.own) or 1.0
    trips = [sum(forward[at:]) + sum(backward[at:]) for at in cells]
    drains = tuple(min(count, math.ceil(sum(backward[:at]) / deferred[at])) if deferred[at] else 0 for at in cells)
    ahead = tuple(max(1, min(count, math.ceil(EXACT * fill * trip / period))) for trip in trips)
    every, none = (count,) * len(cells), (0,) * len(cells)
    first, last = {"all": (every, every), "last": (none, drains), "first and last": (drains, drains)}[split]
    order = tuple(_order(own, backwards_first, step, weights_first) for own in problem.own)
    return Policy(ahead, none if keep == "nothing" else every, first, last, order, keep == "what fits", patience)


def _order(own: Sequence[int], backwards_first: bool, step: int, weights_first: bool) -> tuple[tuple[str, int], ...]:
    """Returns the order of a stage's choices; with a ``step`` of 1 backwards of its earlier cells and forwards of its
    later ones first."""
    backwards, forwards = [("B", at) for at in own[::step]], [("F", at) for at in own[::-step]]
    choices = backwards + forwards if backwards_first else forwards + backwards
    recomputes, weights = [("R", at) for at in own], [("W", at) for at in own]
    return (*weights, *choices, *recomputes) if weights_first else (*choices, *recomputes, *weights)


def _changed(policy: Policy, micro_batches: int, rng: random.Random) -> Policy:
    """Returns a policy that differs in one choice, of one cell or stage or of all."""
    name = rng.choice(
        ("ahead", "ahead", "ahead", "order", "order", "patience", "drops", "graphs", "first_split", "last_split")
    )
    if name == "drops":
        return replace(policy, drops=not policy.drops)
    if name == "patience":
        return replace(policy, patience=rng.choice((0.0, 0.1, 0.3, 0.5, 0.8, 1.0)))
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
