"""How many micro-batches a plan chooses, and how many are too many."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest

from experiments.base.cluster import Cluster, parse_cluster
from experiments.base.experiment import Experiment
from experiments.planning import choose
from experiments.planning.choose import numbers_of_micro_batches, try_plan
from experiments.planning.problem import estimated_costs, row_errors
from suite.errors import PlanError
from suite.pipeline.planning.devices import GIB
from suite.pipeline.planning.simulate import simulate
from suite.pipeline.schedule.action import Schedule
from suite.pipeline.schedule.config import ScheduleConfig
from suite.pipeline.schedule.timeline import Timeline
from tests.experiments.planning.works import LAPTOP, MIB, ROOMY, LinearModel, linear, peaks, refused, translation


class Counts(NamedTuple):
    """The micro-batches of each schedule that is generated, and of each step that is simulated."""

    generated: list[int]
    simulated: list[int]


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counts:
    counts, bare = Counts([], []), ScheduleConfig.base_schedule

    def counted_bare(schedule_config: ScheduleConfig, stages: int, micro_batches: int) -> Schedule:
        counts.generated.append(micro_batches)
        return bare(schedule_config, stages, micro_batches)

    def counted_simulate(schedule: Schedule, *rest: Any) -> Timeline:
        counts.simulated.append(1 + max(action.micro_batch for action in schedule[0]))
        return simulate(schedule, *rest)

    monkeypatch.setattr(ScheduleConfig, "base_schedule", counted_bare)
    monkeypatch.setattr("suite.pipeline.planning.plan.simulate", counted_simulate)
    return counts


def test_more_micro_batches_than_a_mini_batch_can_have_rows_are_refused_at_once(counts: Counts) -> None:
    """Ten million of them would take minutes and gigabytes to plan; only the nearest plan is made."""
    fault = refused(linear("pipeline.schedule=auto pipeline.stages=2 pipeline.micro_batches=10000000"), ROOMY)
    assert 0 < max(counts.generated) <= 32
    assert 0 < max(counts.simulated) <= 32
    assert "R = 1 x M = 10,000,000 micro-batches are more than the 32 examples" in fault.errors[0]
    assert "choose R x M of 32 or less" in fault.errors[0]
    assert fault.remedy


def test_sentences_are_as_many_as_a_mini_batch_may_have_each_of_a_token_at_the_least() -> None:
    assert row_errors(translation("pipeline.micro_batches=1000 train.batch_tokens=1000")) == []
    assert row_errors(translation("pipeline.micro_batches=1001 train.batch_tokens=1000"))


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "candidates"), [("auto", 8), ("1f1b", 1)])
@pytest.mark.parametrize(
    ("cluster", "fault", "generated"),
    [(Cluster(1, GIB, "gpu"), "need 2 devices", set()), (Cluster(2, MIB, "gpu"), "alone needs", {2048})],
    ids=["devices", "memory"],
)
def test_too_few_devices_or_bytes_for_many_micro_batches_are_refused_without_a_step_simulated(
    cluster: Cluster, fault: str, generated: set[int], schedule: str, candidates: int, counts: Counts
) -> None:
    many = "pipeline.stages=2 pipeline.micro_batches=2048 train.batch_sequences=2048"
    with pytest.raises(PlanError, match=fault):
        try_plan(linear(f"pipeline.schedule={schedule} {many}"), cluster, estimated_costs)
    assert counts.simulated == []
    assert set(counts.generated) == generated
    assert len(counts.generated) <= candidates


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_the_plan_chooses_the_number_of_micro_batches_that_makes_a_step_the_shortest(stages: int) -> None:
    settings = f"pipeline.stages={stages} pipeline.micro_batches="
    cluster = parse_cluster("1x8xH100", LAPTOP)
    planned = try_plan(linear(f"{settings}auto"), cluster, estimated_costs)
    chosen = planned.experiment.pipeline.micro_batches
    given = {
        count: try_plan(linear(f"{settings}{count}"), cluster, estimated_costs).step_s
        for count in (stages << power for power in range(6))
        if count <= 32
    }
    assert chosen == min(given, key=lambda count: given[count])
    assert planned.step_s == given[chosen]
    (note,) = [line for line in planned.notes if line.startswith(f"the plan chose M = {chosen}: a step takes ")]
    assert f"with M = {stages}, " in note


def room_between(work: LinearModel, more: int, fewer: int) -> Cluster:
    """Returns devices that have room for ``more`` micro-batches and not for ``fewer``."""
    sizes = [max(peaks(work.with_settings(f"pipeline.micro_batches={count}"))) for count in (more, fewer)]
    return replace(ROOMY, bytes_per_device=int(sum(sizes) / 2 / 0.95))


def test_micro_batches_that_do_not_fit_are_not_chosen_and_if_none_fits_64_k_are_refused() -> None:
    work = linear("pipeline.stages=2 pipeline.micro_batches=auto train.batch_sequences=512 text.length=64")
    planned = try_plan(work, room_between(work, 4, 2), estimated_costs)
    assert planned.experiment.pipeline.micro_batches >= 4
    assert planned.notes[-1].endswith("; fewer than 4 do not fit")
    with_64_k = work.with_settings("pipeline.micro_batches=128")
    too_small, faults = replace(ROOMY, bytes_per_device=max(peaks(with_64_k)) // 2), []
    for each in (work, with_64_k):
        with pytest.raises(PlanError) as fault:
            try_plan(each, too_small, estimated_costs)
        faults.append(fault.value.errors)
    assert faults[0] == faults[1]


def test_more_than_64_k_micro_batches_are_chosen_where_only_they_fit() -> None:
    work = linear("pipeline.micro_batches=auto pipeline.stages=1 train.batch_sequences=128")
    planned = try_plan(work, room_between(work, 128, 64), estimated_costs)
    assert planned.experiment.pipeline.micro_batches == 128


def test_micro_batches_are_bounded_by_the_examples_alone() -> None:
    def counts(settings: str) -> list[int]:
        work = translation(f"pipeline.micro_batches=auto text.max_length=10 {settings}")
        return [tried.pipeline.micro_batches for tried in numbers_of_micro_batches(work)]

    assert counts("pipeline.stages=2 train.batch_tokens=10000") == [2 << power for power in range(9)] + [1000]
    assert counts("pipeline.stages=4 pipeline.replicas=2 train.batch_tokens=320") == [4, 8, 16]
    assert counts("pipeline.stages=4 train.batch_tokens=190") == [4, 8, 16]
    assert counts("pipeline.stages=4 train.batch_tokens=30") == [3]


def test_the_search_for_micro_batches_goes_on_where_a_step_gets_a_little_longer(monkeypatch) -> None:
    """As where only more micro-batches are small enough not to be recomputed."""
    steps = {2: 5.0, 4: 4.0, 8: 4.01, 16: 3.0, 32: 3.1, 64: 1.0}
    work = linear("pipeline.stages=2 pipeline.micro_batches=auto train.batch_sequences=64")

    @dataclass(frozen=True)
    class Planned:
        experiment: Experiment
        notes: tuple[str, ...] = ()

        @property
        def step_s(self) -> float:
            return steps[self.experiment.pipeline.micro_batches]

    monkeypatch.setattr(choose, "_plan_of", lambda choice, *_: Planned(choice))
    found = try_plan(work, ROOMY, estimated_costs)
    assert found.experiment.pipeline.micro_batches == 16
    assert found.notes[0].endswith("4.01 s with M = 8, 3.00 s with M = 16, 3.10 s with M = 32")
    steps |= {16: 4.02}
    found = try_plan(work, ROOMY, estimated_costs)
    assert found.experiment.pipeline.micro_batches == 4
    assert found.notes[0].endswith("4.00 s with M = 4, 4.01 s with M = 8, 4.02 s with M = 16")
