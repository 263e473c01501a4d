"""Plans on clusters of several kinds of devices."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby, product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.base.cluster import parse_cluster
from experiments.planning.best import best_plans
from experiments.planning.planner import plan_workload
from experiments.planning.single_plan import estimated_costs
from experiments.planning.unequal_replicas import shares_of
from suite.errors import PlanError
from suite.pipeline.schedule.remat import UNLIMITED
from tests.experiments.planning.works import LAPTOP, language, refused, translation

MIXED = parse_cluster("4xH100+4xP100", LAPTOP)
WIDE = "model.width=1024 model.feed_forward=4096"


@pytest.mark.parametrize("replicas", [1, 2])
def test_each_stage_has_a_device_and_stage_k_of_all_replicas_the_same_kind(replicas: int) -> None:
    work = translation(f"pipeline.stages=3 pipeline.replicas={replicas} {WIDE}")
    report = plan_workload(work, MIXED, estimated_costs)
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


@pytest.mark.slow
def test_best_plans_use_several_kinds() -> None:
    plans = best_plans(translation(WIDE), MIXED, estimated_costs, "pipeline.micro_batches=8")
    assert plans == sorted(plans, key=lambda report: report.step_s)
    assert any(len({stage.name for stage in report.plan.machine.stages}) == 2 for report in plans)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_kind_that_is_not_used_changes_nothing(replicas: int) -> None:
    wide = translation(f"pipeline.stages=2 pipeline.replicas={replicas} model.width=1024 model.feed_forward=4096")
    alone, beside = (
        plan_workload(wide, parse_cluster(text, LAPTOP), estimated_costs) for text in ("2x3xH100", "2x3xH100+1xP100")
    )
    assert {stage.name for stage in beside.plan.machine.stages} == {"H100"}
    assert beside.step_s == alone.step_s
    assert alone.placement is not None
    assert beside.placement is not None
    assert beside.placement.ids == alone.placement.ids


def test_equal_stages_on_two_kinds_have_a_line_each() -> None:
    """Both kinds are as fast; one has twice the memory."""
    plan = plan_workload(language(6, 12), parse_cluster("3xV100+3xV100-32GB", LAPTOP), estimated_costs)
    assert len({stage.name for stage in plan.plan.machine.stages}) == 2
    for line in plan.lines():
        if found := re.match(r"  stages? (\d+)(?:-(\d+))? on ([\w-]+):", line):
            first, last = int(found[1]), int(found[2] or found[1])
            assert {plan.plan.machine.stages[k].name for k in range(first, last + 1)} == {found[3]}


def test_a_refusal_names_the_device_of_the_stage_and_a_plan_that_fits() -> None:
    """Three stages need the smaller devices too; two fit the larger ones."""
    wide = translation("pipeline.stages=3 pipeline.micro_batches=2 model.width=1024 model.feed_forward=4096")
    fault = refused(wide, parse_cluster("2xH100:4GiB+2xP100:3.4GiB", LAPTOP))
    assert re.search(r"the (H100:4GiB has 4.00|P100:3.4GiB has 3.40) GiB", fault.errors[0])
    assert "pipeline.stages=" in fault.remedy


def test_replicas_that_no_kinds_hold_count_all_devices_as_the_slowest() -> None:
    """Neither has each kind a stage of all four replicas, nor do three and five devices hold two pairs each."""
    work = translation("pipeline.stages=2 pipeline.replicas=4 model.width=2048 model.feed_forward=8192")
    report = plan_workload(work, parse_cluster("3xH100+5xP100", LAPTOP), estimated_costs)
    equal = plan_workload(work, parse_cluster("3xP100+5xP100", LAPTOP), estimated_costs)
    assert "all devices count as P100, the slowest" in report.notes
    assert report.step_s == equal.step_s
    assert report.placement is not None
    assert report.placement.ids == sorted(report.placement.ids)


@pytest.mark.parametrize(("text", "stages", "replicas"), [("4xH100+4xP100", 1, 8), ("3xH100+6xP100", 2, 4)])
def test_a_slow_replica_gets_fewer_micro_batches(text: str, stages: int, replicas: int) -> None:
    """No kind has a stage of all replicas. Each replica takes as long as one of a run on its kind alone."""
    wide = "model.width=2048 model.feed_forward=8192"
    work = translation(f"pipeline.stages={stages} pipeline.replicas={replicas} {wide}")
    report = plan_workload(work, parse_cluster(text, LAPTOP), estimated_costs)
    count = {share.device: share.micro_batches for share in report.shares}
    assert 1 <= count["P100"] < 8 < count["H100"]
    assert sum(share.micro_batches for share in report.shares) == 8 * replicas
    steps = []
    for device, micro_batches in count.items():
        settings = {"micro_batches": micro_batches, "layers_per_cell": report.plan.layers_per_cell}
        own = work.with_pipeline(work.pipeline.model_copy(update=settings))
        equal = parse_cluster("+".join(re.sub("x[HP]100", f"x{device}", part) for part in text.split("+")), LAPTOP)
        steps.append(plan_workload(own, equal, lambda _, cluster: estimated_costs(work, cluster)).step_s)
    assert max(steps) <= report.step_s <= max(steps) * 1.2  # between its kinds is a slower link
    assert report.placement is not None
    kinds = [node.device for node in report.placement.nodes]
    assert tuple(kinds) == report.rank_devices
    assert all(len(set(kinds[at : at + stages])) == 1 for at in range(0, len(kinds), stages))
    slow = re.compile(
        r"replicas? 0(-\d)? on P100: \d( or \d)? micro-batches, .* forwards recomputed, bubble .*, largest"
    )
    assert any(map(slow.match, report.notes)), report.notes


def test_each_kind_keeps_as_many_graphs_as_its_memory_holds() -> None:
    work = translation(f"pipeline.replicas=2 pipeline.stages=1 {WIDE} pipeline.remat=auto")
    few = parse_cluster("1xH100+1xP100:4.1GiB", LAPTOP)
    graphs = {share.device: share.max_live_graphs for share in plan_workload(work, few, estimated_costs).shares}
    assert graphs["P100:4.1GiB"] < graphs["H100"] == (UNLIMITED,)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(1, 4), st.integers(0, 8))
def test_no_other_shares_end_earlier(seconds: list[int], stages: int, more: int) -> None:
    total = len(seconds) + more

    def end(shares: Sequence[int]) -> int:
        return max(each * (share + stages - 1) for each, share in zip(seconds, shares, strict=True))

    others = product(range(1, more + 2), repeat=len(seconds))
    shares = shares_of(seconds, stages, total)
    assert sum(shares) == total
    assert end(shares) == min(end(other) for other in others if sum(other) == total)


def test_a_schedule_from_a_file_has_equal_replicas(tmp_path: Path) -> None:
    """Its rows are of M micro-batches."""
    file = tmp_path / "own.csv"
    file.write_text("0F0,0F1,0B0,0B1\n")
    shape = "pipeline.stages=1 pipeline.replicas=2 pipeline.micro_batches=2"
    work = translation(f"{shape} pipeline.remat=never pipeline.schedule={file} {WIDE}")
    of_one_speed = parse_cluster("1xV100+1xV100-32GB", LAPTOP)
    assert plan_workload(work, of_one_speed, estimated_costs).shares == ()
    work = work.with_settings("pipeline.schedule=fill_drain")
    assert [share.micro_batches for share in plan_workload(work, of_one_speed, estimated_costs).shares] == [2, 2]


def test_more_workers_than_devices_are_refused() -> None:
    fault = refused(translation("pipeline.stages=3 pipeline.replicas=3"), MIXED)
    assert fault.errors[0] == (
        "K = 3 stages x R = 3 replicas need 9 devices, there are 4 H100 with 79.0 GiB each and 4 P100 with 15.8 GiB "
        "each"
    )


def test_a_layer_too_large_for_every_kind_is_named() -> None:
    tiny = parse_cluster("4xA100:2.5GiB+4xH100:2.4GiB", LAPTOP)
    with pytest.raises(PlanError, match=r"layer \d+ alone needs .* the device has 2.50 GiB"):
        plan_workload(translation("pipeline.stages=4"), tiny, estimated_costs)
