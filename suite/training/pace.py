"""Finds workers that are persistently slower than their peers, such as one whose GPU is hot.

Every EVERY steps each worker adds up the seconds in which its device computes, and sends them with the norms of the
next step. A worker's peers are the same stage of the other replicas; without replicas the other stages, each measured
against its plan.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence

import torch

from suite.log import Log
from suite.pipeline.model.topology import RankCoord
from suite.pipeline.runtime.recorder import Recorder
from suite.training.metrics import SLOW, stage_metric

EVERY, LOOKS = 5, 3
"""Steps between two looks, and looks in a row in which a slow worker is slow."""

FACTOR, FACTOR_OF_PLAN = 1.3, 1.6
"""How many times its peers' median a slow worker takes; where plans are compared, which are less exact, more."""


class Pace:
    """Of one worker; all of them must look in the same steps."""

    def __init__(
        self, coord: RankCoord, device: torch.device, planned_busy_s: Sequence[float], hosts: Sequence[str], log: Log
    ) -> None:
        """``planned_busy_s`` are the seconds in which each stage computes in a step; empty: unknown. ``hosts`` are all
        workers', by rank."""
        self._coord, self._planned_busy_s, self._hosts, self._log = coord, planned_busy_s, hosts, log
        self._recorder, self._busy_s = Recorder(device), 0.0
        self._slow_looks, self._named = Counter[int](), set[int]()

    def recorder(self, step: int) -> Recorder | None:
        """Returns the started recorder of a step that is looked at, otherwise None."""
        if step % EVERY:
            return None
        self._recorder.begin()
        return self._recorder

    def note(self, recorder: Recorder) -> None:
        """Takes the busy seconds of a step, without its update, in which a replica waits for others."""
        self._busy_s = sum(span.seconds for span in recorder.spans() if span.kind != "U")

    def take(self) -> float:
        """Returns the busy seconds of the step before; 0 if it was not looked at."""
        busy_s, self._busy_s = self._busy_s, 0.0
        return busy_s

    def slow_workers(self, step: int, busy_s: Sequence[float]) -> dict[str, float]:
        """Takes the busy seconds of all workers by rank. Returns a metric for each that was slow in the last LOOKS
        looks: how many times as long as its peers it computes. Logs it, once."""
        metrics: dict[str, float] = {}
        for rank, ratio in self._ratios(busy_s).items() if all(busy_s) else ():
            factor = FACTOR if self._coord.replicas > 1 else FACTOR_OF_PLAN
            self._slow_looks[rank] = self._slow_looks[rank] + 1 if ratio >= factor else 0
            if self._slow_looks[rank] < LOOKS:
                continue
            replica, stage = divmod(rank, self._coord.stages)
            metrics[stage_metric(replica, stage, SLOW)] = ratio
            if rank not in self._named:
                self._named.add(rank)
                self._log(
                    f"step {step}: replica {replica}, stage {stage} on {self._hosts[rank]} computes {ratio:.2f} times "
                    f"as long as its peers, for {EVERY * LOOKS} steps now: its device may be hot, shared or failing"
                )
        return metrics

    def _ratios(self, busy_s: Sequence[float]) -> dict[int, float]:
        """Returns how many times the median of its peers each worker takes."""
        stages, replicas = self._coord.stages, self._coord.replicas
        if replicas > 1:
            groups = [[replica * stages + stage for replica in range(replicas)] for stage in range(stages)]
            relative = list(busy_s)
        elif stages > 1 and self._planned_busy_s and all(self._planned_busy_s):
            groups = [[*range(stages)]]
            relative = [measured / planned for measured, planned in zip(busy_s, self._planned_busy_s, strict=True)]
        else:
            return {}
        return {
            rank: relative[rank] / statistics.median(relative[other] for other in group if other != rank)
            for group in groups
            for rank in group
        }
