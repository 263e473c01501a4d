"""The fastest settings of a run: no other is planned faster, and what the user sets stays."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from experiments.base.cluster import Cluster, parse_cluster
from experiments.planning import choose
from experiments.planning.choose import best_plans, try_plan
from experiments.planning.problem import estimated_costs
from experiments.planning.report import PlanReport, settings_of
from experiments.planning.request import noted_plans, plan_request
from suite.errors import PlanError
from suite.pipeline.planning.devices import GIB
from tests.experiments.planning.works import LAPTOP, MIB, OWN_SCHEDULE, ROOMY, linear, peaks

FREE = "train.batch_sequences=64"


def shape(report: PlanReport) -> tuple[int, int]:
    return report.experiment.pipeline.stages, report.experiment.pipeline.replicas


@pytest.mark.slow
@pytest.mark.parametrize("cluster", ["4xH100", "6x16GiB"])
def test_no_other_setting_is_planned_faster(cluster: str) -> None:
    work, devices = linear(FREE), parse_cluster(cluster, LAPTOP)
    plans = best_plans(work, devices, estimated_costs, FREE)
    others = []
    for stages, replicas, power in itertools.product(range(1, 7), range(1, 7), range(4)):
        if stages * replicas > devices.devices:
            continue
        for schedule, remat in itertools.product(("fill_drain", "1f1b", "zero_bubble"), ("never", "except_last")):
            changes = {
                "stages": stages, "replicas": replicas, "micro_batches": stages << power, "schedule": schedule,
                "remat": remat,
            }  # fmt: skip
            other = work.with_pipeline(work.pipeline.model_copy(update=changes))
            others.append(try_plan(other, devices, estimated_costs).step_s)
    assert plans[0].step_s <= 1.01 * min(others)  # M was chosen with 1F1B
    assert [plan.step_s for plan in plans] == sorted(plan.step_s for plan in plans)


@pytest.mark.parametrize("cluster", ["8xH100", "6x16GiB"])
def test_only_shapes_that_cannot_be_among_the_fastest_are_left_out(
    cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, devices = linear(FREE), parse_cluster(cluster, LAPTOP)
    monkeypatch.setattr(choose, "SHOWN", 2)
    left = choose.plans_of_shapes(work, devices, estimated_costs, "")
    bound = choose.least_step_s
    monkeypatch.setattr(choose, "least_step_s", lambda *_: 0.0)
    every = choose.plans_of_shapes(work, devices, estimated_costs, "")
    assert list(map(shape, left[:2])) == list(map(shape, every[:2]))
    assert len(left) < len(every)
    assert all(0 < bound(report.experiment, devices, estimated_costs) <= report.step_s for report in every)


@pytest.mark.parametrize(
    ("kind", "given", "expected"),
    [
        ("gpu", "", {(1, 6), (2, 3), (3, 2), (6, 1)}),
        ("cpu", "", {(1, 6), (2, 3), (3, 2), (6, 1), (1, 1)}),  # one worker, whose threads have all cores
        ("cpu", "pipeline.replicas=6", {(1, 6)}),
    ],
)
def test_only_shapes_that_no_other_exceeds_are_planned(kind, given: str, expected: set[tuple[int, int]]) -> None:
    given = f"{FREE} {given} pipeline.schedule=1f1b"
    plans = best_plans(linear(given), Cluster(6, 12 * GIB, kind), estimated_costs, given)
    assert set(map(shape, plans)) == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("pipeline.stages=2 pipeline.schedule=1f1b", {(2, 4)}),
        ("pipeline.stages=2 pipeline.micro_batches=22", {(2, 2)}),  # of 64 rows; more replicas would have none for some
        ("pipeline.replicas=3 pipeline.micro_batches=16", {(2, 3)}),
        ("pipeline.stages=2 pipeline.replicas=2 pipeline.remat=always", {(2, 2)}),
        ("pipeline.layers_per_cell=3,4 pipeline.stages=2 pipeline.schedule=fill_drain", {(2, 4)}),
        ("pipeline.virtual_stages=2 pipeline.schedule=interleaved pipeline.stages=2", {(2, 4)}),
    ],
)
def test_what_is_given_stays(given: str, expected: set[tuple[int, int]]) -> None:
    work = linear(f"{FREE} {given}")
    plans = best_plans(work, ROOMY, estimated_costs, f"{FREE} {given}")
    assert set(map(shape, plans)) == expected
    for name in re.findall(r"pipeline\.(\w+)=", given):
        assert {getattr(plan.plan.pipeline, name) for plan in plans} == {getattr(work.pipeline, name)}


def test_a_schedule_of_your_own_keeps_its_stages_and_micro_batches(tmp_path: Path) -> None:
    (tmp_path / "own.csv").write_text(OWN_SCHEDULE)
    given = f"pipeline.schedule={tmp_path / 'own.csv'} pipeline.micro_batches=2 pipeline.stages=2"
    (plan,) = best_plans(linear(given), ROOMY, estimated_costs, given)
    assert (shape(plan), plan.experiment.pipeline.micro_batches) == ((2, 4), 2)


def test_the_settings_of_a_plan_make_the_plan() -> None:
    work, cluster = linear(FREE), parse_cluster("4xH100", LAPTOP)
    plans = best_plans(work, cluster, estimated_costs, FREE)
    assert len(plans) == 3
    for plan in plans:
        again = plan_request(work.with_settings(settings_of(plan, work)), cluster, estimated_costs)
        assert (again.step_s, again.plan.layers_per_cell) == (plan.step_s, plan.plan.layers_per_cell)


def test_stages_of_several_cells_are_no_more_than_the_layers_allow() -> None:
    given = "pipeline.replicas=1 pipeline.schedule=interleaved pipeline.virtual_stages=2"
    plans = best_plans(linear(f"{given} pipeline.stages=2"), ROOMY, estimated_costs, given)
    assert shape(plans[0]) == (3, 1)  # 7 layers


@pytest.mark.usefixtures("without_nccl")
def test_a_given_shape_that_does_not_fit_is_refused_with_the_nearest_that_does() -> None:
    given = "pipeline.stages=1 pipeline.replicas=1 pipeline.micro_batches=1"
    work = linear(given)
    cluster = Cluster(4, peaks(work)[0] // 2, "gpu")
    with pytest.raises(PlanError, match=r"alone needs .* GiB"):
        best_plans(work, cluster, estimated_costs, given)
    with pytest.raises(PlanError) as fault:
        noted_plans(work, cluster, estimated_costs, given, ("a note",), best=True, log=print)
    (settings,) = re.findall(r'--set "([^"]+)"', fault.value.remedy)
    assert plan_request(work.with_settings(settings), cluster, estimated_costs)
    assert fault.value.notes == ("a note",)


@pytest.mark.usefixtures("without_nccl")
def test_a_run_that_fits_no_shape_is_refused_with_what_it_needs() -> None:
    with pytest.raises(PlanError, match=r"needs .* GiB"):
        best_plans(linear(), Cluster(3, MIB // 2, "gpu"), estimated_costs, "")
