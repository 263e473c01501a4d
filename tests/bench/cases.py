"""Benchmark cases of the suite against its peers on the same work, and who runs when.

    round 0    A B C D      all entrants, in random order
    round 1    D C B A      the same entrants backwards: what changes steadily affects all alike
    round 2    C A D B      another order, and so on

An entrant's turn is a few steps. Entrants that only sleep share their processes. Each entrant that computes has
processes of its own, which wait while others run.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from suite.errors import SettingError, nearest
from suite.pipeline.planning.costs import LayerCost
from suite.pipeline.planning.partition import cell_ranges
from suite.pipeline.planning.simulate import CellCost, simulate
from suite.pipeline.schedule.config import ScheduleConfig
from suite.pipeline.schedule.remat import MAX_LIVE_GRAPHS
from tests.bench.peers.workload import BenchWorkload, LanguageModelWork, OverheadWork, SyntheticWork, TranslationWork


@dataclass(frozen=True)
class Case:
    """One table of the benchmark."""

    work: BenchWorkload
    steps: int = 2
    """Steps of a turn."""
    rounds: int = 6
    """An even number. An interval of fewer than six rounds is too narrow."""
    own_processes: bool = False
    """Whether each entrant has processes of its own."""

    @property
    def name(self) -> str:
        work = self.work
        replicas = f"-r{work.replicas}" if work.replicas > 1 else ""
        return f"bench-{work.name}-k{work.stages}-m{work.micro_batches}{replicas}"

    @property
    def title(self) -> str:
        work = self.work
        replicas = f", R = {work.replicas}" if work.replicas > 1 else ""
        return f"{work.name}: K = {work.stages}, M = {work.micro_batches}{replicas}"


CASES: dict[str, tuple[Case, ...]] = {
    "sleeping": (
        *(Case(SyntheticWork(k, 8), rounds=12) for k in (2, 4, 8)),
        Case(SyntheticWork(8, 32)),
        Case(SyntheticWork(16, 64), steps=1),
    ),
    "layers": (Case(LanguageModelWork(2, 8), own_processes=True),),
    "translation": (Case(TranslationWork(2, 8), steps=4, own_processes=True),),
    "overhead": tuple(Case(OverheadWork(k, 32), steps=8, rounds=40) for k in (1, 2)),
    "replicas": (Case(SyntheticWork(2, 8, replicas=2, parameters=1 << 20)),),
}


def cases(name: str) -> tuple[Case, ...]:
    """Returns the cases of a name. Raises SettingError for an unknown one."""
    if name not in CASES:
        raise SettingError(f"there is no benchmark {name!r}; {nearest(name, CASES)}")
    return CASES[name]


def turn_order(names: Collection[str], number: int) -> list[str]:
    """Returns the order of entrants in a round, counted from 0: random in even rounds, backwards in the next one."""
    known = sorted(names)
    order = [known[place] for place in np.random.default_rng(number // 2).permutation(len(known))]
    return order if number % 2 == 0 else order[::-1]


def ideal_fill_drain_s(costs: Sequence[LayerCost], cells: Sequence[int], micro_batches: int, recomputes: bool) -> float:
    """Returns the seconds of a fill-drain step without message times. For equal stages this is

    (M+K-1)(F+B) + (M-1)R with early recompute, (M+K-1)(F+B) without; for unequal ones the schedule is simulated.
    """
    stages = []
    for cell in cell_ranges(cells, len(costs)):
        in_cell = [costs[index] for index in cell]
        forward, recompute, backward = (
            sum(getattr(cost, name) for cost in in_cell) for name in ("forward_s", "recompute_s", "backward_s")
        )
        stages.append(CellCost(forward, recompute, backward))
    schedule_config = ScheduleConfig(max_live_graphs=(MAX_LIVE_GRAPHS["except_last" if recomputes else "never"],))
    return simulate(schedule_config.actions(len(cells), micro_batches), stages).seconds
