"""A plan's record and text agree with the plan."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from experiments.base.cluster import Cluster, parse_cluster
from experiments.base.figures import in_figures, in_hour_interval, in_hours, in_seconds
from experiments.base.workload import Measurable
from experiments.planning.choose import try_plan
from experiments.planning.problem import LayerCosts, estimated_costs
from experiments.planning.request import noted_plans, plan_request
from suite.pipeline.model.layers import count_parameters
from suite.pipeline.planning.devices import GIB
from tests.experiments.planning.works import LAPTOP, ROOMY, LinearModel, language, linear, translation

LINE = re.compile(r"  stages? (\d+)(?:-(\d+))?: layers (\d+)-(\d+) \((\d+)( each)?\), ([\d,]+) parameters, F .* GiB$")
KEYS = {
    "name", "cluster", "costs", "measured", "parameters", "layers", "K", "M", "R", "remat", "cells", "step_s",
    "lower_bound_s", "tokens_per_second", "bubble", "steps", "hours", "device_bytes", "notes", "stages", "schedule",
    "virtual_stages", "recomputed", "forwards", "schedules", "nodes", "reserve_bytes", "hours_interval",
    "step_interval_s",
}  # fmt: skip
STAGE_KEYS = {
    "stage", "cell", "first_layer", "last_layer", "parameters", "forward_s", "recompute_s", "backward_s", "update_s",
    "activation_bytes", "gradient_bytes", "idle", "peak_bytes", "process_bytes",
}  # fmt: skip


def test_the_record_is_whole_and_agrees_with_itself() -> None:
    work = translation("pipeline.stages=3 pipeline.replicas=2 train.steps=90")
    cluster = parse_cluster("6xH100", LAPTOP)
    (planned,) = noted_plans(work, cluster, estimated_costs, "", ("a note",), best=False, log=print)
    found = json.loads(json.dumps(planned.as_dict(), allow_nan=False))
    assert found.keys() == KEYS
    stages = found["stages"]
    assert all(stage.keys() == STAGE_KEYS for stage in stages)
    assert (found["name"], found["notes"][0], found["measured"]) == ("t12_400m", "a note", False)
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
    assert found["hours_interval"] == pytest.approx([90 * end / 3600 for end in found["step_interval_s"]])
    assert found["bubble"] == pytest.approx(sum(stage["idle"] for stage in stages) / 3)
    assert found["step_s"] >= found["lower_bound_s"] > 0
    assert max(stage["peak_bytes"] for stage in stages) <= found["device_bytes"] - found["reserve_bytes"]
    assert (found["device_bytes"], found["reserve_bytes"]) == (79 * GIB, int(0.05 * 79 * GIB))
    assert (stages[0]["gradient_bytes"], stages[-1]["activation_bytes"]) == (0, 0)
    assert all(stage["activation_bytes"] > stage["gradient_bytes"] > 0 for stage in stages[1:-1])


def test_a_step_of_one_stage_is_the_sum_of_its_actions() -> None:
    planned = plan_request(linear("pipeline.stages=1 pipeline.micro_batches=4"), ROOMY, estimated_costs)
    costs = planned.problem.costs
    forward, recompute, backward, update = (
        sum(getattr(cost, name) for cost in costs) for name in ("forward_s", "recompute_s", "backward_s", "update_s")
    )
    # three forwards that are recomputed, and the last, which records its graph at once
    assert planned.plan.step_s == pytest.approx(3 * (forward + recompute + backward) + recompute + backward + update)
    assert planned.plan.timeline.bubble == pytest.approx(0, abs=1e-9)


def test_lines_tell_every_stage_once_and_alike_ones_together() -> None:
    work, cluster = (
        linear("pipeline.stages=6 pipeline.layers_per_cell=4,4,4,4,4,4 model.blocks_per_stack=22"),
        parse_cluster("6x16GiB", LAPTOP),
    )
    (planned,) = noted_plans(work, cluster, estimated_costs, "", ("why so",), best=False, log=print)
    lines = planned.lines()
    assert lines[0].startswith("plan of transformer_5 on 6 ")
    assert "simulated from estimated layer costs" in lines[0]
    assert lines[1] == "  why so"
    matches = [match for match in map(LINE.match, lines) if match]
    stages, layers = [], []
    for first, last, begin, end, count, each, _ in (match.groups() for match in matches):
        several = range(int(first), int(last or first) + 1)
        stages += several
        layers += range(int(begin), int(end) + 1)
        assert int(count) * len(several) == int(end) - int(begin) + 1
        assert (each is not None) == (len(several) > 1)
    assert stages == list(range(6))
    assert layers == list(range(24))
    assert [bool(match[6]) for match in matches] == [False, True, False]  # blocks between the ends are alike
    text, bound = "\n".join(lines), in_seconds(planned.plan.lower_bound_s)
    assert f"  step {in_seconds(planned.step_s)}; with these cells no schedule can take less than {bound}\n" in text
    assert "  100,000 steps of 32,768 tokens: " in text
    heading = ["schedules", "that", "fit", "step", "largest", "stage", "forwards", "recomputed"]
    start = next(at for at, line in enumerate(lines) if line.split() == heading)
    fastest = min((row for row in planned.as_dict()["schedules"]), key=lambda row: row["step_s"])
    assert f'--set "pipeline.schedule={fastest["schedule"]}' in lines[-1]
    assert planned.lines(is_brief=True) == [*lines[:start], lines[-1]]
    assert all(len(line) < 200 for line in lines)


@pytest.mark.parametrize("schedule", ["fill_drain", "auto"])
def test_a_plan_tells_every_schedule_that_fits_and_marks_its_own(schedule: str) -> None:
    """The numbers of each row are those of a plan of that schedule."""
    work = linear(f"pipeline.stages=2 pipeline.remat=auto pipeline.schedule={schedule}")
    planned = plan_request(work, ROOMY, estimated_costs)
    found = planned.as_dict()["schedules"]
    names = {("fill_drain", 1), ("1f1b", 1), ("zero_bubble", 1), ("interleaved", 2), ("zero_bubble", 2)}
    names |= {("zbv", 2), ("v_half", 2), ("v_min", 2)}
    searched = [row for row in found if row["schedule"] == "search"]
    found = [row for row in found if row not in searched]
    assert {(row["schedule"], row["virtual_stages"]) for row in found} == names
    assert len(found) == len(names)
    for row in found:
        name, count = row["schedule"], row["virtual_stages"]
        alone = work.with_settings(f"pipeline.schedule={name} pipeline.virtual_stages={count}")
        plan = try_plan(alone, ROOMY, estimated_costs).plan
        assert row["step_s"] == plan.step_s
        assert row["peak_bytes"] == max(cell.peak_bytes for cell in plan.cells)
        assert (row["recomputed"], row["forwards"]) == plan.recomputes
    (chosen,) = [row for row in (*found, *searched) if row["chosen"]]
    assert (chosen["schedule"], chosen["step_s"]) == (planned.as_dict()["schedule"], planned.step_s)
    assert schedule in ("auto", chosen["schedule"])
    (marked,) = [line for line in planned.lines() if line.endswith("<- this plan")]
    assert marked.split()[0].strip(",") == ("found" if searched else chosen["schedule"])


def between_1f1b_and_fill_drain(work: LinearModel) -> Cluster:
    """Returns devices on which 1F1B keeps all its activations and fill-drain does not."""
    kept = work.with_settings("pipeline.remat=never")
    rows = plan_request(kept, ROOMY, estimated_costs).plan.alternatives
    peaks = {row.pipeline.schedule: row.peak_bytes for row in rows if row.pipeline.virtual_stages == 1}
    assert peaks["1f1b"] < peaks["fill_drain"]
    return Cluster(8, int((peaks["1f1b"] + peaks["fill_drain"]) / 2 / 0.95), "gpu")


@pytest.mark.usefixtures("without_nccl")
def test_the_slowest_schedule_by_name_stands_beside_the_faster_ones() -> None:
    work = linear("pipeline.stages=2 pipeline.remat=auto pipeline.micro_batches=32")
    cluster = between_1f1b_and_fill_drain(work)
    rows = [row for row in plan_request(work, cluster, estimated_costs).plan.alternatives if not row.fault]
    assert {row.pipeline.schedule: row.recomputes[0] > 0 for row in rows if row.pipeline.virtual_stages == 1} == {
        "fill_drain": True, "1f1b": False, "zero_bubble": False,
    }  # fmt: skip
    slowest = max(rows, key=lambda row: row.step_s)
    chosen = slowest.pipeline
    named = f"pipeline.schedule={chosen.schedule} pipeline.virtual_stages={chosen.virtual_stages}"
    planned = plan_request(work.with_settings(named), cluster, estimated_costs)
    assert planned.step_s == slowest.step_s > min(row["step_s"] for row in planned.as_dict()["schedules"])


def test_a_schedule_of_given_cells_is_compared_with_those_of_as_many() -> None:
    """The others could not run with these cells; that they need too much memory would not be true."""
    settings = "pipeline.stages=2 pipeline.layers_per_cell=2,2,2,1"
    planned = plan_request(
        linear(f"{settings} pipeline.schedule=zbv pipeline.virtual_stages=2"), ROOMY, estimated_costs
    )
    assert {alternative.pipeline.virtual_stages for alternative in planned.plan.alternatives} == {2}
    assert not [line for line in planned.lines() if "do not fit" in line]


@pytest.mark.usefixtures("without_nccl")
def test_schedules_that_do_not_fit_are_one_line() -> None:
    work = linear("pipeline.stages=2 pipeline.remat=never pipeline.schedule=1f1b pipeline.micro_batches=32")
    planned = plan_request(work, between_1f1b_and_fill_drain(work), estimated_costs)
    (refused,) = [row for row in planned.as_dict()["schedules"] if row["schedule"] == "fill_drain"]
    assert refused.keys() == {"schedule", "virtual_stages", "chosen", "fault"}
    assert "GiB" in refused["fault"]
    (line,) = [line for line in planned.lines() if line.startswith("  do not fit: ")]
    assert "fill_drain" in line


def test_an_estimated_plan_says_where_the_speed_of_products_does_not_matter() -> None:
    work = linear("pipeline.stages=2 train.steps=2000000 text.length=8 train.batch_sequences=8")
    planned = plan_request(work, parse_cluster("2x1xH100", LAPTOP), estimated_costs)
    last = next(line for line in planned.lines() if "2,000,000 steps" in line)
    assert last.endswith(" hours (estimated; the speed of matrix products does not matter here)")


def test_an_estimated_plan_tells_its_hours_as_an_interval_and_a_measured_one_as_a_number() -> None:
    work = linear("pipeline.stages=2 pipeline.layers_per_cell=5,2 train.steps=200000 train.batch_sequences=1000")
    cluster = parse_cluster("2x1xH100", LAPTOP)
    planned = plan_request(work, cluster, estimated_costs)
    assert cluster.device is not None
    low, high = planned.as_dict()["hours_interval"]
    assert low < planned.hours < high
    for share, hours in zip(reversed(cluster.device.efficiency_range), (low, high), strict=True):
        other = replace(cluster, device=replace(cluster.device, efficiency=share))
        assert hours == pytest.approx(plan_request(work, other, estimated_costs).hours)
    last = next(line for line in planned.lines() if "200,000 steps" in line)
    assert last.endswith("(matrix products at 70% to 30% of the peak; that range is a choice, not a measurement)")
    assert " to " in last.partition("(")[0]

    def measured(work: Measurable, cluster: Cluster) -> LayerCosts:
        return replace(estimated_costs(work, cluster), measured=True, device=None, at_extremes=())

    planned = plan_request(work, cluster, measured)
    assert planned.as_dict()["hours_interval"] is None
    assert f"  200,000 steps of 1,024,000 tokens: {in_hours(planned.hours * 3600)}" in planned.lines()


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(72_000, 360_000, "20 to 100 hours"), (60, 7200, "1.0 minutes to 2.00 hours"), (3.0, 5.5, "3.00 s to 5.50 s")],
)
def test_an_interval_has_the_unit_of_its_ends(low: float, high: float, expected: str) -> None:
    assert in_hour_interval(low, high) == expected


@pytest.mark.usefixtures("without_nccl")
def test_a_plan_leaves_the_reserve_free_and_says_so() -> None:
    work = linear("pipeline.stages=2 pipeline.remat=auto pipeline.memory_reserve=0.25")
    planned = plan_request(work, Cluster(2, GIB, "gpu"), estimated_costs)
    assert (planned.plan.machine.memory_limit_bytes, planned.plan.machine.reserve) == (GIB * 3 // 4, GIB // 4)
    assert "of 0.75 GiB (1.00 GiB minus a reserve of 25%)" in "\n".join(planned.lines())
    work = linear("pipeline.stages=2 pipeline.remat=auto")
    for kind, share in (("gpu", 0.05), ("cpu", 0.3)):
        planned = plan_request(work, Cluster(2, GIB, kind), estimated_costs)
        assert planned.plan.machine.reserve == int(share * GIB)


def test_parameters_that_several_stages_hold_and_idle_devices_are_told() -> None:
    works = linear("pipeline.stages=3"), language(stages=1, blocks=1)
    tied, untied = (plan_request(work, ROOMY, estimated_costs).lines() for work in works)
    assert "  3 of the 8 devices are used, 5 are idle" in tied
    assert f"{8000 * 1024:,} are copies" in "\n".join(tied)
    assert "copies" not in "\n".join(untied)


def test_small_numbers_keep_two_figures_and_a_short_run_is_told_in_minutes_or_seconds() -> None:
    values = (0.0042, 0.42, 3.14159, 47.3, 12345.6)
    assert [*map(in_figures, values)] == ["0.0042", "0.42", "3.1", "47", "12,346"]
    assert [*map(in_hours, (7200, 90, 5))] == ["2.00 hours", "1.5 minutes", "5.00 s"]
