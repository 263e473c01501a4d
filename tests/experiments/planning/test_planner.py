"""Plans of real models over declared devices: they agree with themselves, and what is advised where none fits does."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from torch import nn

from experiments.base.cluster import Cluster, parse_cluster
from experiments.base.workload import Measurable
from experiments.planning.neighbours import adapted
from experiments.planning.plan_report import LayerCosts, PlanReport, in_figures, in_hours
from experiments.planning.planner import RESERVE, attempt, estimated_costs, least_memory, make, row_faults
from experiments.registry import find, resolve
from experiments.translation.language_model import LanguageModel
from experiments.translation.workload import Translation
from models.language_model import LanguageModelShape
from suite.errors import BusyError, PlanError
from suite.pipeline.model.layers import count_parameters
from suite.pipeline.planning.devices import GIB
from suite.pipeline.planning.memory import bytes_per_parameter
from suite.pipeline.planning.placement import Node
from suite.pipeline.planning.simulate import Link, simulate
from suite.pipeline.schedule.action import Schedule
from suite.pipeline.schedule.config import ScheduleConfig
from suite.pipeline.schedule.timeline import Timeline
from suite.settings import OptimizerSettings, PipelineSettings

MIB = 2**20
LAPTOP = Cluster(2, 12 * GIB, "cpu")
ROOMY = Cluster(8, 12 * GIB, "gpu")


def translation(settings: str = "") -> Translation:
    """T(2, 128, 1) of 7 layers at the laptop's scale, rebuilt as the paper does where nothing else is said."""
    remat = "" if "pipeline.remat" in settings else "pipeline.remat=except_last"
    return Translation(resolve("t12_400m", "laptop", LAPTOP, f"model.layers=2 {remat} {settings}")[0])


def language(stages: int = 4, blocks: int = 10) -> LanguageModel:
    shape = LanguageModelShape(blocks, width=64, feed_forward=256, heads=4, vocabulary=100, time=32)
    return LanguageModel(shape, PipelineSettings(stages=stages, micro_batches=8))


def refused(work: Any, cluster: Cluster, pricer: Any = estimated_costs) -> PlanError:
    with pytest.raises(PlanError) as fault:
        make(work, cluster, pricer)
    return fault.value


def peaks(work: Any) -> list[int]:
    """Returns the bytes of each stage where there is room enough."""
    return [stage.peak_bytes for stage in make(work, ROOMY, estimated_costs).plan.cells]


def test_bytes_of_stages_follow_parameters_micro_batches_and_remat() -> None:
    work = Translation(resolve("t48_1_3b_deep", "laptop", LAPTOP, "pipeline.stages=2 pipeline.remat=except_last")[0])
    plain = peaks(work)
    assert len(plain) == 2
    assert sum(plain) > 16 * count_parameters(work.build()[0])
    kept = peaks(Translation(work.experiment.with_settings("pipeline.remat=never")))
    assert all(more > less for more, less in zip(kept, plain, strict=True))
    fine = peaks(Translation(work.experiment.with_settings("pipeline.micro_batches=16")))
    assert all(less < more for less, more in zip(fine, plain, strict=True))


def test_activations_of_a_feed_forward_layer_are_those_counted_by_hand() -> None:
    work = translation("model.dropout=0.1 pipeline.stages=1")
    encoder = estimated_costs(work, LAPTOP).costs[1]
    run = work.experiment
    rows = -(-run.train.batch_tokens // (run.pipeline.micro_batches * run.text.max_length))
    tokens, width, hidden, attention, heads = rows * run.text.max_length, 64, 128, 32, 1
    # two LayerNorms' results and two statistics each; q, k, v; the attention's result, the logarithm of a sum for each
    # head, and its mask as numbers; hidden; two dropout masks; what each half of the layer adds up to
    floats = 2 * width + 4 + 3 * attention + attention + heads + 1 + hidden + 2 * width + 2 * width
    assert encoder.activation_bytes == tokens * 4 * floats
    assert encoder.boundary_bytes == tokens * (4 * width + 1 + 8)
    assert encoder.gradient_bytes == tokens * 4 * width  # neither the mask nor the target's ids carry one
    matrices = 3 * attention * width + attention * width + 2 * hidden * width
    assert encoder.parameters == matrices + (3 * attention + width + hidden + width) + 4 * width
    undropped = estimated_costs(translation("pipeline.stages=1"), LAPTOP).costs[1]
    assert encoder.activation_bytes - undropped.activation_bytes == tokens * 4 * 2 * width


@pytest.mark.parametrize(
    ("name", "precision", "replicas", "each"),
    [("adamw", "fp32", 1, 16), ("adamw", "fp32", 4, 12), ("adamw", "bf16", 4, 12), ("adafactor", "bf16", 8, 8)],
)
def test_bytes_of_a_parameter(name: Any, precision: Any, replicas: int, each: float) -> None:
    assert bytes_per_parameter(OptimizerSettings(name=name, precision=precision), replicas) == each


KEYS = {
    "name",
    "cluster",
    "costs",
    "measured",
    "parameters",
    "layers",
    "K",
    "M",
    "R",
    "remat",
    "cells",
    "step_s",
    "limit_s",
    "tokens_per_second",
    "bubble",
    "steps",
    "hours",
    "device_bytes",
    "notes",
    "stages",
    "schedule",
    "virtual_stages",
    "recomputed",
    "forwards",
    "nodes",
    "reserve_bytes",
}
STAGE_KEYS = {
    "first_layer", "last_layer", "parameters", "forward_s", "recompute_s", "backward_s", "update_s", "sends_bytes",
    "returns_bytes", "idle", "peak_bytes",
}  # fmt: skip


def test_the_record_is_whole_and_agrees_with_itself() -> None:
    work = translation("pipeline.stages=3 pipeline.replicas=2 train.steps=90")
    planned = make(work, parse_cluster("6xH100", LAPTOP), estimated_costs, ("a note",))
    found = json.loads(json.dumps(planned.as_dict(), allow_nan=False))
    assert found.keys() == KEYS
    stages = found["stages"]
    assert all(stage.keys() == STAGE_KEYS for stage in stages)
    assert (found["name"], found["notes"], found["measured"]) == ("t12_400m", ["a note"], False)
    assert (found["K"], found["R"], found["M"], found["remat"]) == (3, 2, 8, "except_last")
    assert (found["schedule"], found["virtual_stages"]) == ("fill_drain", 1)
    assert (found["recomputed"], found["forwards"]) == (3 * 7, 3 * 8)
    assert sum(found["cells"]) == found["layers"] == 7
    assert found["cells"] == [stage["last_layer"] - stage["first_layer"] + 1 for stage in stages]
    assert [stage["first_layer"] for stage in stages] == [0, *(stage["last_layer"] + 1 for stage in stages[:-1])]
    assert found["parameters"] == count_parameters(work.build()[0])
    # the vocabulary's matrix is the source's and the target's embedding: two copies, one parameter
    assert sum(stage["parameters"] for stage in stages) == found["parameters"] + 2000 * 64
    assert found["tokens_per_second"] == pytest.approx(1024 / found["step_s"])
    assert found["hours"] == pytest.approx(90 * found["step_s"] / 3600)
    assert found["bubble"] == pytest.approx(sum(stage["idle"] for stage in stages) / 3)
    assert found["step_s"] >= found["limit_s"] > 0
    assert max(stage["peak_bytes"] for stage in stages) <= found["device_bytes"] - found["reserve_bytes"]
    assert (found["device_bytes"], found["reserve_bytes"]) == (79 * GIB, int(RESERVE * 79 * GIB))
    assert (stages[0]["returns_bytes"], stages[-1]["sends_bytes"]) == (0, 0)
    assert all(stage["sends_bytes"] > stage["returns_bytes"] > 0 for stage in stages[1:-1])


def test_a_step_of_one_stage_is_the_sum_of_its_actions() -> None:
    planned = make(translation("pipeline.stages=1 pipeline.micro_batches=4"), ROOMY, estimated_costs)
    costs = planned.layer_costs.costs
    forward, recompute, backward, update = (
        sum(getattr(cost, name) for cost in costs) for name in ("forward_s", "recompute_s", "backward_s", "update_s")
    )
    # three forwards that are rebuilt, and the last, which records its graph at once
    assert planned.plan.step_s == pytest.approx(3 * (forward + recompute + backward) + recompute + backward + update)
    assert planned.plan.timeline.bubble == pytest.approx(0, abs=1e-9)


LINE = re.compile(r"  stages? (\d+)(?:-(\d+))?: layers (\d+)-(\d+) \((\d+)( each)?\), ([\d,]+) parameters, F .* GiB$")


def test_lines_tell_every_stage_once_and_alike_ones_together() -> None:
    planned = make(language(stages=6, blocks=22), parse_cluster("6x16GiB", LAPTOP), estimated_costs, ("why so",))
    lines = planned.lines()
    assert lines[0].startswith("plan of transformer_22 on 6 ")
    assert "simulated from estimated layer costs" in lines[0]
    assert lines[1] == "  why so"
    matches = [match for match in map(LINE.match, lines) if match]
    stages, layers, shared = [], [], 0
    for first, last, begin, end, count, each, _ in (match.groups() for match in matches):
        several = range(int(first), int(last or first) + 1)
        stages += several
        layers += range(int(begin), int(end) + 1)
        shared += bool(each)
        assert int(count) * len(several) == int(end) - int(begin) + 1
        assert (each is not None) == (len(several) > 1)
    assert stages == list(range(6))
    assert layers == list(range(24))
    assert shared == 1  # the blocks between the ends are alike
    assert len(lines) == 2 + 1 + len(matches) + 2
    assert lines[-1].startswith("  100,000 steps of 1,024 tokens: ")
    assert all(len(line) < 200 for line in lines)


def test_stages_that_differ_are_told_apart() -> None:
    planned = make(translation("pipeline.stages=7"), ROOMY, estimated_costs)
    text = "\n".join(planned.lines())
    assert all(f"stage {k}: layers {k}-{k} (1)" in text for k in (0, 3, 6))  # the embeddings and the head
    assert "stages 1-2: layers 1-2 (1 each)" in text
    assert "stages 4-5: layers 4-5 (1 each)" in text


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
    work = translation("pipeline.stages=2 train.batch_tokens=4096")
    work = work.with_pipeline(PipelineSettings(stages=2, replicas=replicas, micro_batches=micro_batches))
    changed, (note,) = adapted(work, Cluster(devices, GIB, "gpu"))
    assert (changed.pipeline.replicas, changed.pipeline.micro_batches) == expected
    assert (changed.pipeline.stages, changed.batch) == (2, 4096)
    assert f"R 8 -> {expected[0]} and M 3 -> {expected[1]}" in note


@pytest.mark.parametrize("devices", [16, 100, 1, 0])
def test_nothing_is_adapted_where_all_fits_or_nothing_would(devices: int) -> None:
    work = translation("pipeline.stages=2 pipeline.replicas=8 pipeline.micro_batches=2")
    assert adapted(work, Cluster(devices, GIB, "gpu")) == (work, ())


def test_cells_by_hand_are_the_plans_cells() -> None:
    planned = make(translation("pipeline.stages=3 pipeline.layers_per_cell=1,5,1"), ROOMY, estimated_costs)
    assert planned.plan.layers_per_cell == (1, 5, 1)
    assert make(translation("pipeline.stages=3"), ROOMY, estimated_costs).plan.layers_per_cell != (1, 5, 1)


def test_cells_by_hand_that_do_not_fit_are_named_and_may_go() -> None:
    work = translation("pipeline.stages=2 pipeline.layers_per_cell=1,6")
    _, heavy = peaks(work)
    fault = refused(work, Cluster(2, heavy - 1, "gpu"))
    assert len(fault.faults) == 1
    assert fault.faults[0].startswith(f"stage 1 (layers 1-6) needs {heavy / GIB:.2f} GiB")
    assert settings_of(fault)[0] == "pipeline.layers_per_cell=none"


def test_every_fault_is_told_at_once() -> None:
    work = translation("pipeline.stages=2 pipeline.replicas=3 pipeline.micro_batches=8 train.batch_tokens=1000")
    fault = refused(work, Cluster(5, 2 * MIB, "gpu"))
    devices, *memory = fault.faults
    assert devices.startswith("K = 2 stages x R = 3 replicas need 6 devices, there are 5 GPUs")
    assert memory
    assert all("needs" in line or "fewest" in line for line in memory)
    assert str(fault).startswith(f"{len(fault.faults)} faults:\n- {devices}\n- ")


def test_a_language_models_rows_are_counted() -> None:
    """32 sequences; sentences of a translation are as many as it takes, each of a token at the least."""
    fault = refused(language(stages=2).with_settings("pipeline.micro_batches=33"), parse_cluster("64x16GiB", LAPTOP))
    assert "R = 1 x M = 33 micro-batches are more than the 32 examples that a step of" in fault.faults[0]
    assert make(
        translation("pipeline.micro_batches=999 train.batch_tokens=1000"), ROOMY, estimated_costs
    ).plan.layers_per_cell


@pytest.mark.parametrize(
    ("replicas", "micro_batches", "advice"),
    [
        (4, 9, "pipeline.micro_batches=8 or fewer"),
        (32, 2, "pipeline.micro_batches=1"),
        (64, 2, "pipeline.replicas=16 or fewer"),
        (64, 32, "pipeline.replicas=1"),
        (64, 33, "pipeline.replicas=1 with pipeline.micro_batches=32 or fewer"),
    ],
)
def test_an_advice_on_too_many_micro_batches_is_one_that_can_be_set(
    replicas: int, micro_batches: int, advice: str
) -> None:
    pipeline = PipelineSettings(stages=2, replicas=replicas, micro_batches=micro_batches)
    work = language().with_pipeline(pipeline)
    (fault,) = row_faults(work)
    assert fault.endswith(f"; use {advice}")
    settings = re.findall(r"pipeline\.\w+=\d+", advice)
    assert row_faults(work.with_settings(" ".join(settings))) == []


class Counts:
    """The micro-batches of each schedule that is generated, and of each step that is simulated."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.generated: list[int] = []
        self.simulated: list[int] = []
        bare = ScheduleConfig.without_recompute

        def counted_bare(schedule_config: ScheduleConfig, stages: int, micro_batches: int) -> Schedule:
            self.generated.append(micro_batches)
            return bare(schedule_config, stages, micro_batches)

        def counted_simulate(schedule: Schedule, *rest: Any) -> Timeline:
            self.simulated.append(1 + max(action.micro_batch for action in schedule[0]))
            return simulate(schedule, *rest)

        monkeypatch.setattr(ScheduleConfig, "without_recompute", counted_bare)
        monkeypatch.setattr("suite.pipeline.planning.plan.simulate", counted_simulate)


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counts:
    return Counts(monkeypatch)


@pytest.mark.parametrize("schedule", ["auto", "1f1b"])
def test_more_micro_batches_than_a_mini_batch_can_have_rows_are_refused_at_once(schedule: str, counts: Counts) -> None:
    """Ten million of them would take minutes and gigabytes to plan; only the nearest plans are made."""
    work = translation(f"pipeline.schedule={schedule} pipeline.stages=2 pipeline.micro_batches=10000000")
    fault = refused(work, ROOMY)
    assert 0 < max(counts.generated) <= 1024
    assert 0 < max(counts.simulated) <= 1024
    assert "M = 10,000,000 micro-batches are more than the 1,024 examples" in fault.faults[0]
    assert "use pipeline.micro_batches=1024 or fewer" in fault.faults[0]
    assert fault.remedies


@pytest.mark.parametrize(("schedule", "candidates"), [("auto", 5), ("1f1b", 1)])
@pytest.mark.parametrize("cluster", [Cluster(1, GIB, "gpu"), Cluster(2, MIB, "gpu")], ids=["devices", "memory"])
def test_a_plan_of_many_micro_batches_is_refused_without_a_step_simulated(
    cluster: Cluster, schedule: str, candidates: int, counts: Counts
) -> None:
    many = "pipeline.stages=2 pipeline.micro_batches=2048 train.batch_tokens=4096"
    with pytest.raises(PlanError):
        attempt(translation(f"pipeline.schedule={schedule} {many}"), cluster, estimated_costs)
    assert counts.simulated == []
    assert set(counts.generated) == {2048}
    assert len(counts.generated) <= candidates


class Frozen(LanguageModel):
    """Every parameter is frozen."""

    def build(self) -> tuple[list[nn.Module], nn.Module]:
        layers, loss = super().build()
        return [layer.requires_grad_(False) for layer in layers], loss

    def key(self) -> str:
        return f"frozen {super().key()}"


def test_a_model_that_is_frozen_whole_is_refused_before_anything_is_priced() -> None:
    def layer_costs(work: Measurable, cluster: Cluster) -> LayerCosts:
        raise AssertionError("priced")

    plain = language(stages=2)
    fault = refused(Frozen(plain.shape, plain.pipeline), ROOMY, layer_costs)
    assert re.match(r"all \d+ parameters of the model are frozen", str(fault))
    assert fault.remedies == ()


def test_the_least_memory_of_a_run_fits_it_and_a_tenth_of_a_gib_less_does_not() -> None:
    work = Translation(find("t128_6b"))
    least = least_memory(work, parse_cluster("128xH100", LAPTOP))
    assert least is not None
    assert least < 79 * GIB
    assert make(
        work, replace(parse_cluster("128xH100", LAPTOP), bytes_per_device=least), estimated_costs
    ).plan.layers_per_cell
    refused(work, replace(parse_cluster("128xH100", LAPTOP), bytes_per_device=least - GIB // 10))


def test_a_plan_leaves_the_reserve_of_accelerators_free_and_says_so() -> None:
    work = translation("pipeline.stages=2 pipeline.remat=auto")
    planned = make(work, Cluster(2, GIB, "gpu"), estimated_costs)
    assert (planned.plan.memory_limit_bytes, planned.plan.reserve) == (GIB - int(RESERVE * GIB), int(RESERVE * GIB))
    assert "of 0.95 GiB (1.00 GiB minus a reserve of 5%)" in "\n".join(planned.lines())
    assert make(work, LAPTOP, estimated_costs).plan.reserve == 0


def test_parameters_that_several_stages_hold_are_told() -> None:
    planned = make(translation("pipeline.stages=3"), ROOMY, estimated_costs)
    assert f"{2000 * 64:,} of them are copies" in "\n".join(planned.lines())
    assert "copies" not in "\n".join(make(language(), ROOMY, estimated_costs).lines())


@pytest.mark.parametrize(
    ("value", "figures"), [(0.0042, "0.0042"), (0.42, "0.42"), (3.14159, "3.1"), (47.3, "47"), (12345.6, "12,346")]
)
def test_small_numbers_keep_two_figures(value: float, figures: str) -> None:
    assert in_figures(value) == figures


@pytest.mark.parametrize(("seconds", "told"), [(7200, "2.00 hours"), (90, "1.5 minutes"), (5, "5.00 s")])
def test_a_short_run_is_told_in_minutes_or_seconds(seconds: float, told: str) -> None:
    assert in_hours(seconds) == told


def instant(work: Measurable, cluster: Cluster) -> LayerCosts:
    """Estimates, with messages that take no time."""
    found = estimated_costs(work, cluster)
    return replace(found, machine=replace(found.machine, link=Link()))


def test_workers_that_take_turns_share_cores_and_memory() -> None:
    """One core and 24 GiB: seven workers compute one after the other, with a seventh of the memory each."""
    core = Cluster(1, 24 * GIB, "cpu")
    one, seven = (make(translation(f"pipeline.stages={k}"), core, instant) for k in (1, 7))
    assert (one.plan.memory_limit_bytes, seven.plan.memory_limit_bytes) == (24 * GIB, 24 * GIB // 7)
    assert one.step_s == one.plan.step_s
    assert seven.step_s == pytest.approx(sum(seven.plan.timeline.busy(k) for k in range(7)))
    assert seven.step_s == seven.plan.step_s > 1.1 * seven.plan.timeline.seconds
    assert "take turns" in "".join(seven.notes)
    assert "take turns" not in "".join(one.notes)


def test_an_advice_is_the_whole_of_the_settings_and_says_what_was_changed_before() -> None:
    given = "pipeline.stages=2 pipeline.remat=never train.seed=3"
    work = translation(given)
    cluster = Cluster(2, int(0.9 * max(peaks(work))), "gpu")
    with pytest.raises(PlanError) as fault:
        make(work, cluster, estimated_costs, ("R 8 -> 1",), given)
    assert settings_of(fault.value)[0] == "pipeline.stages=2 pipeline.remat=except_last train.seed=3"
    assert "(R 8 -> 1)" in str(fault.value)


def test_declared_devices_take_no_turns_but_the_cores_at_hand_do() -> None:
    work = translation("pipeline.stages=4")
    assert make(work, LAPTOP, estimated_costs).plan.layers_per_cell
    declared = replace(parse_cluster("2x16GiB", LAPTOP), kind="cpu")
    assert "need 4 devices" in refused(work, declared).faults[0]


SET = re.compile(r'^SET="([^"]+)": (\d+\.\d\d) GiB per device(?:, (\d+\.\d\d) (m?)s per step)? \(estimated\)$')


def again(work: Translation, remedy: str, cluster: Cluster, pricer: Any) -> PlanReport:
    """Applies an advice as a person would, and plans again."""
    match = SET.match(remedy)
    assert match is not None, remedy
    planned = make(Translation(work.experiment.with_settings(match[1])), cluster, pricer)
    assert (match[3] is None) == (cluster.device is None)  # seconds of a device that nobody declared
    if match[3]:
        seconds = float(match[3]) * (1e-3 if match[4] else 1.0)
        assert planned.plan.step_s == pytest.approx(seconds, rel=0.01, abs=1e-5)
    most = max(stage.peak_bytes for stage in planned.plan.cells)
    assert most == pytest.approx(float(match[2]) * GIB, abs=0.006 * GIB)
    return planned


def settings_of(fault: PlanError) -> list[str]:
    return [match[1] for match in map(SET.match, fault.remedies) if match]


def with_process(size: int) -> Any:
    """Returns a pricer as one that measures: it knows what a worker takes for itself."""

    def layer_costs(work: Measurable, cluster: Cluster) -> LayerCosts:
        found = estimated_costs(work, cluster)
        return replace(found, machine=replace(found.machine, process_bytes=size))

    return layer_costs


@pytest.mark.parametrize("process", [0, 40 * MIB])
@pytest.mark.parametrize(
    ("settings", "devices", "share", "first"),
    [
        ("pipeline.stages=1", 7, 0.8, "pipeline.stages=2"),
        ("pipeline.stages=2 pipeline.remat=never", 2, 0.9, "pipeline.remat=except_last"),
        ("pipeline.stages=2 pipeline.replicas=3 pipeline.micro_batches=4", 5, 1.5, "pipeline.replicas=2 "),
        ("pipeline.stages=4 pipeline.micro_batches=4", 3, 1.5, "pipeline.stages=3"),
        ("pipeline.stages=2 pipeline.micro_batches=2 train.batch_tokens=4096", 2, 0.6, "pipeline.micro_batches=4"),
        ("pipeline.stages=2 pipeline.replicas=4 pipeline.micro_batches=30 train.batch_tokens=4096", 3, 1.1, "pipeline"),
    ],
)
def test_the_nearest_plans_fit_when_they_are_asked_for(
    settings: str, devices: int, share: float, first: str, process: int
) -> None:
    work = translation(settings)
    count = min(16, work.pipeline.micro_batches)
    alone = work.with_pipeline(work.pipeline.model_copy(update={"replicas": 1, "micro_batches": count}))
    cluster = Cluster(devices, int(share * max(peaks(alone))) + process, "gpu")
    fault = refused(work, cluster, with_process(process))
    assert settings_of(fault)
    assert settings_of(fault)[0].startswith(first)
    for remedy in fault.remedies:
        again(work, remedy, cluster, with_process(process))


def test_without_any_plan_that_fits_none_is_promised() -> None:
    for cluster in (Cluster(2, MIB, "gpu"), Cluster(0, 0, "gpu")):
        fault = refused(translation("pipeline.stages=2"), cluster)
        assert fault.remedies == ()
        assert "nearest" not in str(fault)


def test_where_no_setting_helps_the_memory_that_would_is_told() -> None:
    work = language(stages=4)
    fault = refused(work, Cluster(4, MIB, "gpu"))
    assert fault.remedies == ()
    told = r"\(no setting was found that fits; with K = 4 the run needs devices of at least (\S+) GiB\)$"
    (size,) = re.findall(told, str(fault))
    assert make(work, Cluster(4, int(float(size) * GIB), "gpu"), estimated_costs)


def test_where_workers_share_the_memory_of_one_machine_all_of_it_is_told() -> None:
    work = language(stages=4)
    fault = refused(work, Cluster(2, MIB, "cpu"))
    assert fault.remedies == ()
    told = r"\(no setting was found that fits; with K = 4 the run needs at least (\S+) GiB in total\)$"
    (size,) = re.findall(told, str(fault))
    assert make(work, Cluster(2, int(float(size) / 2 * GIB), "cpu"), estimated_costs)
    refused(work, Cluster(2, int((float(size) / 2 - 0.2) * GIB), "cpu"))


def test_more_stages_than_a_language_model_has_layers_are_refused_with_a_way_out() -> None:
    work = language(stages=40)
    fault = refused(work, parse_cluster("64x16GiB", LAPTOP))
    assert "cannot cut 12 layers into 40 stages" in fault.faults[0]
    (settings,) = settings_of(fault)
    assert (
        make(work.with_settings(settings), parse_cluster("64x16GiB", LAPTOP), estimated_costs).plan.layers_per_cell
        == (1,) * 12
    )


def test_the_papers_6b_fits_its_own_devices_and_not_a_quarter_of_their_memory() -> None:
    work = Translation(find("t128_6b"))
    assert make(work, parse_cluster("128x16GiB", LAPTOP), estimated_costs).parameters == 6_040_979_968
    assert "needs" in refused(work, parse_cluster("128x4GiB", LAPTOP)).faults[0]


def test_a_plan_over_nodes_says_where_workers_go_and_plays_the_network_at_the_cuts() -> None:
    work = translation("pipeline.stages=4 pipeline.micro_batches=4")
    device = parse_cluster("4xH100", LAPTOP).device
    slow = Link(0.0, 1e6)

    def step(nodes: tuple[int, ...]) -> float:
        held = tuple(Node(str(at), f"node {at}", count, count) for at, count in enumerate(nodes))
        return make(work, Cluster(4, 79 * GIB, "gpu", held, device, slow), estimated_costs).step_s

    assert step((4,)) == step((8,)) == make(work, parse_cluster("4xH100", LAPTOP), estimated_costs).step_s
    assert step((4,)) < step((3, 1)) < step((1, 1, 1, 1))
    planned = make(work, parse_cluster("2x2xH100", LAPTOP), estimated_costs)
    assert "  replica 0: stages 0-1 on node 0, stages 2-3 on node 1" in planned.lines()
    assert planned.as_dict()["nodes"] == ["node 0", "node 0", "node 1", "node 1"]


def test_workers_of_one_node_of_cpus_share_its_memory() -> None:
    work = translation("pipeline.stages=2 pipeline.micro_batches=2")
    one, two = (Node("a", "a", 4, 4),), (Node("a", "a", 1, 4), Node("b", "b", 1, 4))
    limits = [
        make(work, Cluster(4, GIB, "cpu", nodes), estimated_costs).plan.memory_limit_bytes for nodes in (one, two)
    ]
    assert limits == [2 * GIB, 4 * GIB]


def test_a_reduction_between_nodes_takes_what_was_measured_of_one_and_inside_a_node_what_the_device_has() -> None:
    work = translation("pipeline.stages=1 pipeline.replicas=2 pipeline.micro_batches=4")
    device = parse_cluster("2xH100", LAPTOP).device

    def step(nodes: tuple[int, ...], reduction: Link | None) -> float:
        held = tuple(Node(str(at), f"node {at}", count, count) for at, count in enumerate(nodes))
        cluster = Cluster(2, 79 * GIB, "gpu", held, device, Link(0.0, 1e9), reduction)
        return make(work, cluster, estimated_costs).step_s

    slow = Link(0.0, 1e6)
    assert step((2,), slow) == step((2,), None)
    assert step((2,), None) < step((1, 1), None) < step((1, 1), slow)


def test_devices_that_others_hold_are_no_fault_of_the_plan() -> None:
    def busy(work: Any, cluster: Cluster) -> LayerCosts:
        raise BusyError("others measure")

    with pytest.raises(BusyError, match="others measure"):
        make(translation("pipeline.stages=2"), LAPTOP, busy)
