"""The nearest plan that fits, of a run that does not: few of its settings are free, then more.

cells -> recomputes -> and the schedule -> M -> all of these -> R and M -> K -> K and M
      -> K, R and M -> all -> another schedule -> all, with a half of the mini-batch, a quarter, ...
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import islice

from experiments.base.cluster import Cluster
from experiments.base.experiment import Experiment
from experiments.planning.best import PIPELINE_NAMES, changed_settings, freed, most_replicas
from experiments.planning.memory_limits import shares_cores
from experiments.planning.plan_report import CostModel, PlanReport
from experiments.planning.single_plan import MOST_DOUBLINGS, numbers_of_micro_batches, try_plan
from suite.errors import PlanError, SettingError
from suite.log import Log
from suite.settings import AUTO, PipelineSettings

_SCHEDULE = ("remat", "schedule", "virtual_stages")

FREE = (
    (),
    ("remat",),
    _SCHEDULE,
    ("micro_batches",),
    (*_SCHEDULE, "micro_batches"),
    ("replicas", "micro_batches"),
    ("stages",),
    ("stages", "micro_batches"),
    ("stages", "replicas", "micro_batches"),
    PIPELINE_NAMES,
)
"""The settings that are free, the nearest first; cells by hand always are. A free schedule is 1F1B, then any."""

MANY = 16
"""Micro-batches for each stage where their number is free and so many fit: the bubble is 6%."""


def nearest_plan(work: Experiment, cluster: Cluster, cost_model: CostModel, log: Log) -> tuple[PlanReport, str] | None:
    """Returns the nearest plan that fits, and the settings that make it; None if none fits."""
    without_cells = work.with_pipeline(work.pipeline.model_copy(update={"layers_per_cell": None}))
    search = _Search(work, cluster, cost_model)
    with_others = [free for free in FREE if "schedule" in free]
    for free, any_schedule in [*((free, False) for free in FREE), *((free, True) for free in with_others)]:
        any_text = ", any schedule" if any_schedule else ""
        log(f"the nearest plan that fits, with other {' '.join(free or ('cells',))}{any_text}")
        if (nearest := search.first(without_cells, free, any_schedule=any_schedule)) is not None:
            return nearest
    smaller = list(_smaller_batches(freed(without_cells, ())[0]))
    log("the nearest plan that fits, with a smaller mini-batch")
    at = bisect_left(smaller, True, key=lambda each: search.first(each[0], PIPELINE_NAMES, each[1]) is not None)
    return search.first(smaller[at][0], PIPELINE_NAMES, smaller[at][1]) if at < len(smaller) else None


class _Search:
    """Looks for plans that fit."""

    def __init__(self, work: Experiment, cluster: Cluster, cost_model: CostModel) -> None:
        self._work, self._cluster, self._cost_model = work, cluster, cost_model
        self._failed = set(map(_key, [work, *numbers_of_micro_batches(work)]))
        """What does not fit; ``work`` by costs that may be other ones."""

    def first(
        self, run: Experiment, free: Collection[str], batch: str = "", any_schedule: bool = False
    ) -> tuple[PlanReport, str] | None:
        """Returns the first plan that fits, in the shapes nearest to that of the run asked for, and its settings with
        that of the mini-batch; None if none does. The shape with the most stages needs the least memory."""
        run, fixed = freed(run, set(PIPELINE_NAMES) - set(free))
        if any_schedule:
            run = run.with_pipeline(run.pipeline.model_copy(update={"schedule": "auto"}))
        shapes = list(self._shapes(most_replicas(run, self._cluster, fixed), "replicas" in free))
        if len(shapes) > 1 and self._planned(run, *max(shapes)) is None:
            return None
        for shape in sorted(shapes, key=partial(_distance, self._work.pipeline)):
            if (report := self._planned(run, *shape)) is not None:
                changed = changed_settings(report.experiment.pipeline, self._work.pipeline)
                by_hand = "" if self._work.pipeline.layers_per_cell is None else "pipeline.layers_per_cell=none"
                return report, " ".join(filter(None, [changed, by_hand, batch]))
        return None

    def _shapes(self, most_replicas: Mapping[int, int], has_others: bool) -> Iterator[tuple[int, int]]:
        """Yields the shapes to try: K and R as they are, doubled and halved, 1 and the most; ``has_others`` if R may be
        less than the most."""
        asked = self._work.pipeline
        for stages, most in most_replicas.items():
            if self._cluster.devices < stages * most and not shares_cores(self._cluster):
                continue
            if _is_near(stages, asked.stages, max(most_replicas)):
                fewer = range(1, most) if has_others else ()
                yield from ((stages, replicas) for replicas in fewer if _is_near(replicas, asked.replicas, most))
                yield stages, most

    def _planned(self, run: Experiment, stages: int, replicas: int) -> PlanReport | None:
        """Returns a plan of the run in a shape; None if it does not fit."""
        pipeline = run.pipeline.model_copy(update={"stages": stages, "replicas": replicas})
        for choice in _numbers_of_micro_batches(run.with_pipeline(pipeline)):
            if _key(choice) not in self._failed:
                try:
                    return try_plan(choice, self._cluster, self._cost_model)
                except PlanError:
                    self._failed.add(_key(choice))
        return None


def _key(work: Experiment) -> tuple[int, PipelineSettings]:
    """Returns what differs between the runs of a search."""
    return work.batch, work.pipeline


def _is_near(count: int, asked: int, most: int) -> bool:
    """Whether a number is the one that is asked for, doubled or halved, 1 or the most."""
    return count in (1, most) or math.log2(count / asked).is_integer()


def _distance(asked: PipelineSettings, shape: tuple[int, int]) -> tuple[float, float]:
    """Returns by how many doublings and halvings a shape differs from the one that is asked for, and its stages do."""
    stages, replicas = (
        abs(math.log2(own / other)) for own, other in zip(shape, (asked.stages, asked.replicas), strict=True)
    )
    return round(stages + replicas, 6), stages


def _numbers_of_micro_batches(work: Experiment) -> Iterator[Experiment]:
    """Yields the run with M as it is; with up to 16K and then up to 64K if it is free. Fewer of them are larger, and
    take long to estimate."""
    if work.pipeline.micro_batches != AUTO:
        yield work
        return
    numbers = islice(numbers_of_micro_batches(work), MOST_DOUBLINGS + 1)
    choices = [choice for choice in numbers if not choice.setting_errors()]
    yield from [choice for choice in choices if choice.pipeline.micro_batches <= MANY * work.pipeline.stages][-1:]
    yield from choices[-1:]


def _smaller_batches(work: Experiment) -> Iterator[tuple[Experiment, str]]:
    """Yields the run on one replica with a half of its mini-batch, a quarter, ..., and the setting for it, as long as a
    step has a row for each micro-batch."""
    before = work = work.with_pipeline(work.pipeline.model_copy(update={"replicas": 1}))
    with suppress(SettingError):  # a batch so small that it contradicts other settings
        for power in range(1, work.batch.bit_length()):
            changed, batch = work.with_batch_fraction(2.0**-power)
            if changed.batch == before.batch or changed.min_rows < max(1, work.pipeline.micro_batches):
                return
            yield changed, batch
            before = changed
