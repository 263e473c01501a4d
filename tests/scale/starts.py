"""A start of many workers and its recovery, in simulated time: the detector of stalls and the limits are the suite's,
workers are drawn from measured times.

    Ray starts actors, STARTS_PER_S a second -> each imports -> heartbeats -> all meet -> the first step
    one dies -> the others end, a few of them late -> the late ones start again -> all meet -> the first step
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from launch.backends.stage_actors import END_S, STARTS_PER_S
from launch.supervision.watchdog import StallDetector, Verdict
from launch.worker.heartbeat import Heartbeat
from suite.pipeline.model.topology import RankCoord

TICK_S = 1.0
FORK_S, END_OF_PROCESS_S = 1.0, 0.3
"""Seconds from the order to a forked stage's first heartbeat, and from the order to end to its end."""


@dataclass(frozen=True)
class Machines:
    """What is drawn for each start."""

    import_s: Sequence[float]
    """Measured seconds of a worker's imports; each worker draws one."""
    cold: int = 8
    """Workers on a node whose disk is cold: their imports take ``cold_by`` times as long."""
    cold_by: float = 60.0
    late: int = 1
    """Workers whose process ends ``late_s`` seconds after it should."""
    late_s: float = 40.0
    meet_s: float = 3.0
    """Seconds from the last heartbeat to the first step's end."""


@dataclass(frozen=True)
class Start:
    """What happened."""

    first_step_s: float
    again_s: float
    """Seconds from a worker's death to the end of the first step after it."""
    started_again: int
    """Actors that started a second time."""
    verdict: Verdict | None
    """Of the detector, during the start."""


def simulate(workers: int, machines: Machines, seed: int, one_deadline: bool = False) -> Start:
    """Returns a start. With ``one_deadline`` all ends have END_S together, and one that is late costs all actors: the
    rule that was."""
    rng = random.Random(seed)
    coords = [RankCoord(rank, workers, 1) for rank in range(workers)]
    cold = {*rng.sample(range(workers), machines.cold)}

    def arrivals(starting: Sequence[int], is_cold: bool) -> dict[int, float]:
        by = {rank: machines.cold_by if is_cold and rank in cold else 1.0 for rank in starting}
        begins = {rank: at / STARTS_PER_S for at, rank in enumerate(starting)}
        return {rank: begins[rank] + by[rank] * rng.choice(machines.import_s) + FORK_S for rank in starting}

    first = arrivals(range(workers), is_cold=True)
    verdict = _watch(coords, first)
    ends = dict.fromkeys(range(workers), END_OF_PROCESS_S)
    ends |= dict.fromkeys(rng.sample(range(workers), machines.late), machines.late_s)
    dead = rng.randrange(workers)
    late = [rank for rank, end_s in ends.items() if end_s > END_S]
    again = list(range(workers)) if one_deadline and late else sorted({dead, *late})
    waited_s = END_S if late else END_OF_PROCESS_S
    last = max([FORK_S, *arrivals(again, is_cold=False).values()])
    met_s = max(first.values()) + machines.meet_s
    return Start(met_s, waited_s + last + machines.meet_s, len(again), verdict)


def _watch(coords: Sequence[RankCoord], arrivals: dict[int, float]) -> Verdict | None:
    """Returns the detector's verdict on workers that send a heartbeat a second from their arrival on, and wait for the
    others."""
    detector, now = StallDetector(coords), 0.0
    waits = Heartbeat(0, 0, 1, 1, "host", "node", 0, 1, "start", None, None, 0, None, "the others", 0.0, 1e9, 1e9)
    while now < max(arrivals.values()) + 5:
        now += TICK_S
        beats = {rank: replace(waits, number=int(now)) for rank, at in arrivals.items() if at <= now}
        if verdict := detector.update(beats, TICK_S):
            return verdict
    return None
