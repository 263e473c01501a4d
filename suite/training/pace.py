"""Finds workers that are persistently slower than their peers, such as one whose GPU is hot.

Every LOOK_EVERY_STEPS steps each worker adds up the seconds in which its device computes, and sends them with the norms
of the next step. A worker's peers are the same stage of the other replicas, whose seconds count by the size of their
share of the mini-batch; without replicas the other stages, each measured against its plan.
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

LOOK_EVERY_STEPS, LOOKS, WARM_UP_STEPS = 5, 3, 10
"""Steps between two looks, looks in a row in which a slow worker is slow, and first steps that do not count."""

FACTOR, FACTOR_OF_PLAN = 1.3, 1.6
"""How many times its peers' median a slow worker takes; where plans are compared, which are less exact, more."""


class Pace:
    """Of one worker; all of them must look in the same steps."""

    def __init__(
        self,
        coord: RankCoord,
        device: torch.device,
        start: int,
        planned_busy_s: Sequence[float],
        hosts: Sequence[str],
        log: Log,
    ) -> None:
        """Training begins at step ``start``. ``planned_busy_s`` are the seconds in which each stage computes in a step;
        empty: unknown. ``hosts`` are all workers', by rank."""
        self._start = start
        self._coord, self._planned_busy_s, self._hosts, self._log = coord, planned_busy_s, hosts, log
        self._recorder = Recorder(device)
        self._busy_s = self._size = 0.0
        self._slow_looks, self._named = Counter[int](), set[int]()

    def recorder(self, step: int) -> Recorder | None:
        """Returns the started recorder of a step that is looked at, otherwise None."""
        if not self._is_look(step):
            return None
        self._recorder.begin()
        return self._recorder

    def note(self, step: int, recorder: Recorder, size: float) -> None:
        """Takes the busy seconds of a step that is looked at, without its update, in which a replica waits for others,
        and the size of this worker's share; 0 if it has none."""
        if self._is_look(step):
            self._size = size
            self._busy_s = sum(span.seconds for span in recorder.spans() if span.kind != "U")

    def take(self) -> tuple[float, float]:
        """Returns the busy seconds and the share's size of the step before; 0 if it was not looked at."""
        look = self._busy_s, self._size
        self._busy_s = self._size = 0.0
        return look

    def slow_workers(self, step: int, busy_s: Sequence[float], sizes: Sequence[float]) -> dict[str, float]:
        """Takes the busy seconds of all workers by rank, and the size of each one's share, 0 where it has none.

        Returns a metric for each that was slow in the last LOOKS looks: how many times as long as its peers it
        computes. Logs it, once.
        """
        metrics: dict[str, float] = {}
        for rank, ratio in self._ratios(busy_s, sizes).items() if all(busy_s) else ():
            factor = FACTOR if self._coord.replicas > 1 else FACTOR_OF_PLAN
            self._slow_looks[rank] = self._slow_looks[rank] + 1 if ratio >= factor else 0
            if self._slow_looks[rank] < LOOKS:
                continue
            replica, stage = divmod(rank, self._coord.stages)
            metrics[stage_metric(replica, stage, SLOW)] = ratio
            if rank not in self._named:
                self._named.add(rank)
                where = f"replica {replica}, stage {stage} on {self._hosts[rank]}"
                self._log(
                    f"step {step}: {where} computes {ratio:.2f} times as long as its peers, in {LOOKS} looks in "
                    f"{LOOK_EVERY_STEPS * LOOKS} steps: its device may be hot, shared or failing"
                )
        return metrics

    def _is_look(self, step: int) -> bool:
        return step >= self._start + WARM_UP_STEPS and step % LOOK_EVERY_STEPS == 0

    def _ratios(self, busy_s: Sequence[float], sizes: Sequence[float]) -> dict[int, float]:
        """Returns how many times the median of its peers each worker takes."""
        stages, replicas = self._coord.stages, self._coord.replicas
        if replicas > 1:
            groups = [[*range(stage, stages * replicas, stages)] for stage in range(stages)]
            shares = [max(sizes[replica * stages : (replica + 1) * stages]) for replica in range(replicas)]
            relative = [measured / max(1.0, shares[rank // stages]) for rank, measured in enumerate(busy_s)]
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
