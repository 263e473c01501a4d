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
from tests.experiments.planning.works import LAPTOP, MIB, ROOMY, translation

FREE = "train.batch_tokens=4096"


def shape(report: PlanReport) -> tuple[int, int]:
    return report.experiment.pipeline.stages, report.experiment.pipeline.replicas


@pytest.mark.slow
@pytest.mark.parametrize("cluster", ["4xH100", "6x16GiB"])
def test_no_other_setting_is_planned_faster(cluster: str) -> None:
    work, devices = translation(FREE), parse_cluster(cluster, LAPTOP)
    plans = best_plans(work, devices, estimated_costs, FREE)
    others = []
    for stages, replicas, power in itertools.product(range(1, 7), range(1, 7), range(5)):
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


@pytest.mark.parametrize("cluster", ["16xH100", "12x16GiB"])
def test_only_shapes_that_cannot_be_among_the_fastest_are_left_out(
    cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, devices = translation(FREE), parse_cluster(cluster, LAPTOP)
    monkeypatch.setattr(choose, "SHOWN", 2)
    left = choose.plans_of_shapes(work, devices, estimated_costs, "")
    bound = choose.least_step_s
    monkeypatch.setattr(choose, "least_step_s", lambda *_: 0.0)
    every = choose.plans_of_shapes(work, devices, estimated_costs, "")
    assert list(map(shape, left[:2])) == list(map(shape, every[:2]))
    assert len(left) < len(every)
    assert all(0 < bound(report.experiment, devices, estimated_costs) <= report.step_s for report in every)


@pytest.mark.slow
def test_only_shapes_that_no_other_exceeds_are_planned() -> None:
    plans = best_plans(translation(FREE), Cluster(6, 12 * GIB, "gpu"), estimated_costs, FREE)
    assert sorted(map(shape, plans)) == [(1, 6), (2, 3), (3, 2), (6, 1)]


@pytest.mark.slow
@pytest.mark.parametrize(("given", "is_planned"), [("", True), ("pipeline.replicas=6", False)])
def test_on_cpus_one_worker_with_all_cores_is_planned_too(given: str, is_planned: bool) -> None:
    given = f"{FREE} {given}"
    plans = best_plans(translation(given), Cluster(6, 12 * GIB, "cpu"), estimated_costs, given)
    assert ((1, 1) in map(shape, plans)) == is_planned


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("pipeline.stages=2", {(2, 4)}),
        ("pipeline.replicas=3", {(2, 3)}),
        ("pipeline.stages=2 pipeline.replicas=2", {(2, 2)}),
        ("pipeline.layers_per_cell=3,4 pipeline.stages=2", {(2, 4)}),
    ],
)
def test_what_is_given_stays(given: str, expected: set[tuple[int, int]]) -> None:
    given = f"{given} pipeline.micro_batches=8 pipeline.schedule=1f1b"
    plans = best_plans(translation(f"{FREE} {given}"), ROOMY, estimated_costs, given)
    assert set(map(shape, plans)) == expected
    if "layers" in given:
        assert plans[0].plan.layers_per_cell == (3, 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "name", "value"),
    [
        ("pipeline.micro_batches=16", "micro_batches", 16),
        ("pipeline.schedule=fill_drain", "schedule", "fill_drain"),
        ("pipeline.remat=never", "remat", "never"),
        ("pipeline.virtual_stages=2 pipeline.schedule=interleaved pipeline.stages=2", "virtual_stages", 2),
    ],
)
def test_a_given_setting_of_every_plan_stays(given: str, name: str, value: object) -> None:
    plans = best_plans(translation(f"{FREE} {given}"), ROOMY, estimated_costs, given)
    assert {getattr(plan.plan.pipeline, name) for plan in plans} == {value}


def test_a_schedule_of_your_own_keeps_its_stages_and_micro_batches(tmp_path: Path) -> None:
    (tmp_path / "own.csv").write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    given = f"pipeline.schedule={tmp_path / 'own.csv'} pipeline.micro_batches=2 pipeline.stages=2"
    (plan,) = best_plans(translation(f"{FREE} {given}"), ROOMY, estimated_costs, given)
    assert (shape(plan), plan.experiment.pipeline.micro_batches) == ((2, 4), 2)


def test_the_settings_of_a_plan_make_the_plan() -> None:
    work, cluster = translation(FREE), parse_cluster("4xH100", LAPTOP)
    plans = best_plans(work, cluster, estimated_costs, FREE)
    assert len(plans) == 3
    for plan in plans:
        again = plan_request(work.with_settings(settings_of(plan, work)), cluster, estimated_costs)
        assert (again.step_s, again.plan.layers_per_cell) == (plan.step_s, plan.plan.layers_per_cell)


@pytest.mark.slow
def test_no_more_replicas_are_planned_than_there_are_rows_for_the_given_micro_batches() -> None:
    given = "pipeline.stages=2 pipeline.micro_batches=16"
    (plan,) = best_plans(translation(f"{given} train.batch_tokens=1600"), ROOMY, estimated_costs, given)
    rows = plan.experiment.min_rows
    assert shape(plan) == (2, rows // 16)
    assert 1 < rows // 16 < 4


def test_stages_of_several_cells_are_no_more_than_the_layers_allow() -> None:
    given = "pipeline.replicas=1 pipeline.schedule=interleaved pipeline.virtual_stages=2"
    plans = best_plans(translation(f"{FREE} {given} pipeline.stages=2"), ROOMY, estimated_costs, given)
    assert shape(plans[0]) == (3, 1)  # 7 layers


@pytest.mark.usefixtures("without_nccl")
def test_a_given_shape_that_does_not_fit_is_refused_with_the_nearest_that_does() -> None:
    given = f"{FREE} pipeline.stages=1 pipeline.replicas=1 pipeline.micro_batches=1"
    work = translation(given)
    with pytest.raises(PlanError, match=r"alone needs .* GiB"):
        best_plans(work, Cluster(4, 24 * MIB, "gpu"), estimated_costs, given)
    with pytest.raises(PlanError) as fault:
        noted_plans(work, Cluster(4, 24 * MIB, "gpu"), estimated_costs, given, ("a note",), best=True, log=print)
    (settings,) = re.findall(r'--set "([^"]+)"', fault.value.remedy)
    assert plan_request(work.with_settings(settings), Cluster(4, 24 * MIB, "gpu"), estimated_costs)
    assert fault.value.notes == ("a note",)


@pytest.mark.slow
@pytest.mark.usefixtures("without_nccl")
def test_a_run_that_fits_no_shape_is_refused_with_what_it_needs() -> None:
    with pytest.raises(PlanError, match=r"needs .* GiB"):
        best_plans(translation(FREE), Cluster(3, 2 * MIB, "gpu"), estimated_costs, FREE)
