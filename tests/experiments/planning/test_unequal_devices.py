"""Plans on clusters of several kinds of devices."""

from __future__ import annotations

from itertools import groupby

import pytest

from experiments.base.cluster import parse_cluster
from experiments.planning.best import best_plans
from experiments.planning.planner import plan_workload
from experiments.planning.single_plan import estimated_costs
from suite.errors import PlanError
from tests.experiments.planning.works import LAPTOP, refused, translation

MIXED = parse_cluster("4xH100+4xP100", LAPTOP)


@pytest.mark.parametrize("replicas", [1, 2])
def test_each_stage_has_a_device_and_stage_k_of_all_replicas_the_same_kind(replicas: int) -> None:
    report = plan_workload(translation(f"pipeline.stages=3 pipeline.replicas={replicas}"), MIXED, estimated_costs)
    names = [stage.name for stage in report.plan.machine.stages]
    assert len(names) == 3
    assert len(list(groupby(names))) == len(set(names)), "a kind's stages follow one another"
    assert all(names.count(name) * replicas <= 4 for name in names)
    assert report.placement is not None
    node_of = {"H100": "node 0", "P100": "node 1"}
    assert [node.name for node in report.placement.nodes] == [node_of[name] for name in names] * replicas
    assert [stage["device"] for stage in report.as_dict()["stages"]] == names
    text = "\n".join(report.lines())
    assert "on 4 H100 with 79.0 GiB each and 4 P100 with 15.8 GiB each" in text
    assert f" on {names[0]}: layers 0-" in text


def test_a_slower_device_gets_fewer_parameters() -> None:
    """Of a wide model: the operators of a narrow one take as long to start on both."""
    wide = translation("pipeline.stages=2 model.width=1024 model.feed_forward=4096")
    mixed, fast, slow = (
        plan_workload(wide, parse_cluster(text, LAPTOP), estimated_costs)
        for text in ("1xH100+1xP100", "2xH100", "2xP100")
    )
    of = {stage["device"]: stage["parameters"] for stage in mixed.as_dict()["stages"]}
    assert of["P100"] < of["H100"]
    assert fast.step_s < mixed.step_s < slow.step_s


def test_best_plans_use_several_kinds() -> None:
    plans = best_plans(translation(), MIXED, estimated_costs, "pipeline.micro_batches=8")
    assert plans == sorted(plans, key=lambda report: report.step_s)
    shapes = [(report.plan.pipeline.stages, report.plan.pipeline.replicas) for report in plans]
    assert all(MIXED.most_replicas(stages) >= replicas for stages, replicas in shapes)


def test_more_stages_than_the_kinds_give_to_each_replica_are_refused() -> None:
    """Three replicas have one H100 and one P100 each."""
    assert MIXED.most_replicas(3) == 2
    fault = refused(translation("pipeline.stages=3 pipeline.replicas=3"), MIXED)
    assert fault.errors[0] == (
        "K = 3 stages x R = 3 replicas need 9 devices, there are 4 H100 with 79.0 GiB each and 4 P100 with 15.8 GiB "
        "each, and stage k of all replicas has the same kind"
    )


def test_a_layer_too_large_for_every_kind_is_named() -> None:
    tiny = parse_cluster("4xA100:2.5GiB+4xH100:2.4GiB", LAPTOP)
    with pytest.raises(PlanError, match=r"layer \d+ alone needs .* the device has 2.50 GiB"):
        plan_workload(translation("pipeline.stages=4"), tiny, estimated_costs)
