"""What is advised where no plan fits, and what is changed without being asked."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments.base.cluster import Cluster, parse_cluster
from experiments.base.workload import Measurable
from experiments.planning import request
from experiments.planning.choose import limit_replicas_to_cluster, try_plan, with_most_micro_batches
from experiments.planning.problem import LayerCosts, estimated_costs
from experiments.planning.report import PlanReport
from experiments.planning.request import noted_plans, plan_request
from suite.errors import PlanError
from suite.pipeline.planning.devices import GIB
from suite.settings import PipelineSettings
from tests.experiments.planning.works import LAPTOP, MIB, OWN_SCHEDULE, LinearModel, linear, peaks, refused

pytestmark = pytest.mark.usefixtures("without_nccl")


@pytest.mark.parametrize(
    ("replicas", "micro_batches", "devices", "expected"),
    [
        (8, 3, 6, (3, 8)),  # 24 micro-batches over 3 replicas
        (8, 3, 10, (5, 5)),  # over 5: 24 do not part evenly, so 25
        (8, 3, 2, (1, 24)),
    ],
)
def test_fewer_replicas_keep_the_mini_batch(
    replicas: int, micro_batches: int, devices: int, expected: tuple[int, int]
) -> None:
    work = linear().with_pipeline(PipelineSettings(stages=2, replicas=replicas, micro_batches=micro_batches))
    changed, (note,) = limit_replicas_to_cluster(work, Cluster(devices, GIB, "gpu"))
    assert (changed.pipeline.replicas, changed.pipeline.micro_batches) == expected
    assert (changed.pipeline.stages, changed.batch) == (2, work.batch)
    assert f"R 8 -> {expected[0]} and M 3 -> {expected[1]}" in note


@pytest.mark.parametrize("devices", [16, 100, 1, 0])
def test_nothing_is_adapted_where_all_fits_or_nothing_would(devices: int) -> None:
    work = linear("pipeline.stages=2 pipeline.replicas=8 pipeline.micro_batches=2")
    assert limit_replicas_to_cluster(work, Cluster(devices, GIB, "gpu")) == (work, ())


def test_a_schedule_of_your_own_keeps_its_stages_and_micro_batches(tmp_path: Path) -> None:
    (tmp_path / "own.csv").write_text(OWN_SCHEDULE)
    own = f"pipeline.schedule={tmp_path / 'own.csv'} pipeline.micro_batches=2 pipeline.stages=2 pipeline.replicas=8"
    changed, (note,) = limit_replicas_to_cluster(linear(own), Cluster(6, GIB, "gpu"))
    assert (changed.pipeline.replicas, changed.pipeline.micro_batches) == (3, 2)
    assert note.startswith("R 8 -> 3: 6 devices")


def test_cells_by_hand_that_do_not_fit_are_named_and_may_go() -> None:
    work = linear("pipeline.stages=2 pipeline.layers_per_cell=1,6")
    _, heavy = peaks(work)
    fault = refused(work, Cluster(2, heavy - 1, "gpu"))
    assert len(fault.errors) == 1
    assert fault.errors[0].startswith(f"stage 1 (layers 1-6) needs {heavy / GIB:.2f} GiB")
    assert settings_of(fault) == "pipeline.layers_per_cell=none"


def test_an_advice_is_the_whole_of_the_settings_and_says_what_was_changed_before() -> None:
    given = "pipeline.stages=2 pipeline.remat=never train.seed=3"
    work = linear(given)
    cluster = Cluster(2, int(0.9 * max(peaks(work))), "gpu")
    with pytest.raises(PlanError) as fault:
        noted_plans(work, cluster, estimated_costs, given, ("R 8 -> 1",), best=False, log=print)
    assert settings_of(fault.value) == "pipeline.stages=2 pipeline.remat=auto train.seed=3"
    assert "(R 8 -> 1)" in str(fault.value)


SET = re.compile(r'^--set "([^"]+)": (\d+\.\d\d) GiB per device(?:, (\d+\.\d\d) (m?)s per step)? \(estimated\)$')


def again(work: LinearModel, remedy: str, cluster: Cluster, pricer: Any) -> PlanReport:
    """Applies an advice as a person would, and plans again."""
    match = SET.match(remedy)
    assert match is not None, remedy
    planned = plan_request(work.with_settings(match[1]), cluster, pricer)
    assert (match[3] is None) == (cluster.device is None)  # seconds of a device that nobody declared
    if match[3]:
        seconds = float(match[3]) * (1e-3 if match[4] else 1.0)
        assert planned.plan.step_s == pytest.approx(seconds, rel=0.01, abs=1e-5)
    most = max(stage.peak_bytes for stage in planned.plan.cells)
    assert most == pytest.approx(float(match[2]) * GIB, abs=0.006 * GIB)
    return planned


def settings_of(fault: PlanError) -> str:
    match = SET.match(fault.remedy)
    assert match is not None, fault.remedy
    return match[1]


def with_process(size: int) -> Any:
    """Returns a pricer as one that measures: it knows what a worker takes for itself."""

    def layer_costs(work: Measurable, cluster: Cluster) -> LayerCosts:
        found = estimated_costs(work, cluster)
        return replace(found, machine=replace(found.machine, process_bytes=size))

    return layer_costs


@pytest.mark.parametrize(
    ("settings", "devices", "share", "process", "names"),
    [
        ("pipeline.stages=1", 7, 0.9, 40 * MIB, "micro_batches"),
        ("pipeline.stages=2 pipeline.remat=never", 2, 0.9, 0, "remat"),
        ("pipeline.stages=2 pipeline.replicas=3", 5, 1.5, 0, "replicas micro_batches"),
        ("pipeline.stages=4 pipeline.micro_batches=4", 3, 1.5, 0, "stages"),
        # R = 3 of 4 with a stage less is nearer than R = 1
        ("pipeline.stages=2 pipeline.replicas=4 pipeline.micro_batches=30", 3, 1.1, 0, "stages replicas micro_batches"),
    ],
)
def test_the_nearest_plan_changes_little_and_fits_when_it_is_asked_for(
    settings: str, devices: int, share: float, process: int, names: str
) -> None:
    work = linear(f"{settings} train.batch_sequences=128")
    count = min(16, work.pipeline.micro_batches)
    alone = work.with_pipeline(work.pipeline.model_copy(update={"replicas": 1, "micro_batches": count}))
    cluster = Cluster(devices, int(share * max(peaks(alone))) + process, "gpu")
    fault = refused(work, cluster, with_process(process))
    assert re.findall(r"\.(\w+)=", settings_of(fault)) == names.split()
    again(work, fault.remedy, cluster, with_process(process))


def test_one_device_gets_more_than_64_micro_batches_where_the_whole_mini_batch_needs_them() -> None:
    work = linear("pipeline.stages=1 pipeline.micro_batches=2 train.batch_sequences=512")
    sizes = [max(peaks(work.with_settings(f"pipeline.micro_batches={m}"))) for m in (64, 256)]
    fault = refused(work, Cluster(1, int(sum(sizes) / 2 / 0.95), "gpu"))
    assert "batch_sequences" not in settings_of(fault)


def test_a_schedule_from_a_file_gets_a_smaller_mini_batch_because_its_micro_batches_stay(tmp_path: Path) -> None:
    (tmp_path / "own.csv").write_text(OWN_SCHEDULE)
    work = linear(f"pipeline.schedule={tmp_path / 'own.csv'} pipeline.micro_batches=2 pipeline.stages=2")
    cluster = Cluster(2, int(0.6 * max(peaks(work))), "gpu")
    fault = refused(work, cluster)
    assert settings_of(fault) == "train.batch_sequences=16"
    again(work, fault.remedy, cluster, estimated_costs)


def test_of_many_devices_as_few_more_are_taken_as_suffice() -> None:
    """Adafactor has no ZeRO: replicas do not help, and no M helps where the parameters alone do not fit."""
    work = linear("pipeline.stages=1 optimizer.name=adafactor pipeline.schedule=1f1b train.batch_sequences=128")
    one, two = (max(peaks(work.with_settings(f"pipeline.stages={k} pipeline.micro_batches={64 * k}"))) for k in (1, 2))
    fault = refused(work, Cluster(7, int((one + two) / 2 / 0.95), "gpu"))
    assert "pipeline.stages=2" in settings_of(fault).split()
    assert "replicas" not in settings_of(fault)


def test_a_run_that_fits_only_with_cells_in_a_v_gets_such_a_schedule() -> None:
    sizes = (50, 30, 30, 10)  # million parameters: two stages in a row hold 70 or more, in a V 60

    def uneven(work: Measurable, cluster: Cluster) -> LayerCosts:
        found = estimated_costs(work, cluster)
        pairs = zip(found.costs, sizes, strict=True)
        return replace(found, costs=tuple(replace(cost, parameters=size * 10**6) for cost, size in pairs))

    work, cluster = linear("pipeline.stages=2 model.blocks_per_stack=2"), Cluster(2, 65 * 16 * 10**6 * 100 // 95, "gpu")
    found = request.nearest_plan(work, cluster, uneven, lambda text: None)
    assert found is not None
    assert "pipeline.schedule=auto" in found[1].split()
    assert found[0].plan.pipeline.virtual_stages == 2


def test_where_the_plan_chooses_m_the_advice_has_its_number() -> None:
    work = linear("pipeline.stages=2 pipeline.micro_batches=auto pipeline.remat=never")
    roomy = parse_cluster("2xH100", LAPTOP)
    least = max(cell.peak_bytes for cell in try_plan(with_most_micro_batches(work), roomy, estimated_costs).plan.cells)
    cluster = replace(roomy, bytes_per_device=least)  # of which 5% are kept free
    fault = refused(work, cluster)
    assert re.findall(r"\.(\w+)=", settings_of(fault)) == ["micro_batches", "remat"]
    again(work, fault.remedy, cluster, estimated_costs)


def test_what_does_not_fit_as_measured_is_not_advised_because_it_does_as_estimated() -> None:
    def measured(work: Measurable, cluster: Cluster) -> LayerCosts:
        found = estimated_costs(work, cluster)
        return replace(found, costs=tuple(replace(c, activation_bytes=9 * c.activation_bytes) for c in found.costs))

    work = linear("pipeline.stages=2")
    fault = refused(work, Cluster(2, 2 * max(peaks(work)), "gpu"), measured)
    assert settings_of(fault) == "pipeline.remat=auto"


def test_without_any_device_no_plan_is_promised() -> None:
    fault = refused(linear("pipeline.stages=2"), Cluster(0, 0, "gpu"))
    assert fault.remedy == ""
    assert "nearest" not in str(fault)


def needed(fault: PlanError, unit: str) -> tuple[str, float]:
    """Returns the settings that need the least memory, and its GiB."""
    assert fault.remedy == ""
    assert "nearest" not in str(fault)
    least = rf"the run needs (?:devices of )?at least (\S+) {unit}\)$"
    sentence = rf'\(no setting was found that fits; with --set "([^"]+)" {least}'
    ((settings, size),) = re.findall(sentence, str(fault))
    return settings, float(size)


def test_where_no_setting_helps_the_memory_that_would_is_told() -> None:
    work = linear("pipeline.stages=2 model.blocks_per_stack=3")
    settings, size = needed(refused(work, Cluster(4, MIB, "gpu")), "GiB")
    assert "pipeline.stages=4" in settings
    enough = Cluster(4, int(size * GIB), "gpu")
    assert plan_request(work.with_settings(settings), enough, estimated_costs)


def test_where_workers_share_the_memory_of_one_machine_all_of_it_is_told() -> None:
    work = linear("pipeline.stages=2 model.blocks_per_stack=2")
    settings, size = needed(refused(work, Cluster(2, MIB, "cpu")), "GiB in total")
    asked = work.with_settings(settings)
    assert plan_request(asked, Cluster(2, int(size / 2 * GIB), "cpu"), estimated_costs)
    with pytest.raises(PlanError):
        try_plan(asked, Cluster(2, int((size / 2 - 0.2) * GIB), "cpu"), estimated_costs)


def test_more_stages_than_a_model_has_layers_are_refused_with_a_way_out() -> None:
    work = linear().with_pipeline(PipelineSettings(stages=40, micro_batches=8))
    cluster = parse_cluster("64x16GiB", LAPTOP)
    fault = refused(work, cluster)
    assert "cannot cut 7 layers into 40 stages" in fault.errors[0]
    assert again(work, fault.remedy, cluster, estimated_costs).plan.layers_per_cell == (1,) * 7
