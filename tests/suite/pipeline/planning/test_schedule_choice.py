"""Searched plans: never slower than the named schedules, within the memory, and they run as saved."""

import random
from dataclasses import replace
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from suite.errors import PlanError
from suite.pipeline.model.cells import CellPlacement, v_shaped
from suite.pipeline.planning import schedule_choice
from suite.pipeline.planning import search as search_module
from suite.pipeline.planning.costs import SkipInput
from suite.pipeline.planning.devices import Machine
from suite.pipeline.planning.fit import Problem
from suite.pipeline.planning.memory import UNCOUNTED_BYTES
from suite.pipeline.planning.partition import with_even_stages
from suite.pipeline.planning.plan import least_limit, make_plan, try_schedule
from suite.pipeline.planning.schedule_choice import _cuts, search_schedule
from suite.pipeline.planning.search import Search
from suite.pipeline.schedule.config import ScheduleConfig, pipeline_errors
from suite.pipeline.schedule.csv_file import parse_rows, recomputes, rows_of
from suite.settings import PipelineSettings
from tests.suite.pipeline.planning.test_auto import CHOICES, ROOMY, layer, layers


@pytest.fixture(autouse=True, scope="module")
def _short_climbs():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search_module, "ACTIONS_WITHOUT_GAIN", 2_000)
        yield


def chosen(costs, room, **pipeline):
    """Returns the plan of auto, and the one that search makes of it."""
    asked = costs, PipelineSettings(schedule="auto", **pipeline), 1.0, Machine(memory_limit_bytes=room)
    plan = make_plan(Problem(*asked))
    return plan, search_schedule(plan, Problem(*asked))


@pytest.mark.slow
@settings(max_examples=25)
@given(layers, st.integers(2, 4), st.integers(1, 6), st.sampled_from(["never", "auto"]), st.integers(2_000, 2_000_000))
def test_a_searched_plan_is_not_slower_and_fits(costs, stages, micro_batches, remat, room):
    asked = {"stages": min(stages, len(costs)), "micro_batches": micro_batches, "remat": remat}
    try:
        plan, searched = chosen(costs, (1 << 20) + room, **asked)
    except PlanError:
        return
    assert searched.lower_bound_s * (1 - 1e-9) <= searched.step_s <= plan.step_s
    assert all(cell.peak_bytes <= searched.machine.memory_limit_bytes for cell in searched.cells)
    if searched.pipeline.schedule != "search":
        assert searched is plan
        return
    assert remat == "auto" or searched.recomputes[0] == 0
    config = searched.schedule_config
    placement = CellPlacement(asked["stages"], config.cell_to_stage(asked["stages"]))
    assert rows_of(parse_rows(config.rows), placement) == config.rows
    assert searched.alternatives[-1].is_of(searched.pipeline)


@pytest.mark.slow
@settings(max_examples=8)
@given(st.integers(0, 10**6))
def test_each_schedule_that_search_finds_fits_the_memory_of_its_plan(seed):
    """What waits between two cells of a stage, and on a CPU for its forward, takes the bytes that the search counts."""
    rng = random.Random(seed)
    stages, micro_batches, costs = rng.randint(2, 4), rng.choice([2, 4, 8]), []
    for at in range(2 * stages + rng.randint(0, 8)):
        spans = [rng.randint(1, at)] if at and rng.random() < 0.3 else []
        skips = tuple(SkipInput(span, rng.randint(1, 90), rng.randint(1, 90), rng.random() < 0.5) for span in spans)
        sizes = dict.fromkeys(("boundary_bytes", "gradient_bytes"), 300 + rng.randint(0, 100))
        sizes |= dict.fromkeys(("activation_bytes", "graph_peak_bytes"), rng.randint(0, 90))
        costs.append(layer(rng.randint(1, 9), skip_inputs=skips, deferred_bytes=rng.randint(0, 60), **sizes))
    pipeline = PipelineSettings(stages=stages, micro_batches=micro_batches, schedule="auto", remat="auto")
    machine = Machine(1 << 50, cores=rng.choice([None, 2]))
    least = least_limit(Problem(costs, pipeline, 1.0, machine), 1)
    machine = replace(machine, memory_limit_bytes=least + rng.choice([0, 300, 1_000]))
    peaks_of_all_cuts(Problem(costs, pipeline, 1.0, machine))


@settings(max_examples=8)
@given(layers, st.integers(2, 4), st.integers(1, 6), st.integers(20_000, 2_000_000))
def test_cuts_of_planned_schedules_are_those_that_planning_them_again_gives(costs, stages, micro_batches, room):
    pipeline = {"stages": min(stages, len(costs)), "micro_batches": micro_batches, "remat": "auto"}
    problem = Problem(costs, PipelineSettings(schedule="auto", **pipeline), 1.0, Machine((1 << 20) + room))
    try:
        plan = make_plan(problem)
    except PlanError:
        return
    named = {(each.pipeline.schedule, each.pipeline.virtual_stages) for each in plan.alternatives}
    planned_again = []

    def noted(candidate):
        planned_again.append((candidate.pipeline.schedule, candidate.pipeline.virtual_stages))
        return try_schedule(candidate)

    with patch.object(schedule_choice, "try_schedule", noted):
        cuts = [ranges for _, ranges in _cuts(plan.alternatives, problem)]
    assert not named & {*planned_again}
    assert cuts == [ranges for _, ranges in _cuts((), problem)]


def peaks_of_all_cuts(problem):
    """Returns the peaks of each schedule that policies find, by its cut; checks that they fit."""
    found = []
    for fit, ranges in _cuts((), problem):
        search = Search(fit.cells_problem(ranges), 0.0)
        search.try_family()
        if search.best is not None:
            found.append(fit.peaks(search.schedule(), ranges))
            assert max(found[-1]) <= problem.machine.memory_limit_bytes
    return found


UNEVEN = [layer(weight, split_s=0.0) for weight in (3, 1, 1, 4, 1, 2, 2, 1, 3, 1)]


def test_a_searched_plan_is_planned_again_from_what_was_saved():
    _, searched = chosen(UNEVEN, ROOMY, stages=2, micro_batches=6, remat="auto")
    assert searched.pipeline.schedule == "search"
    cells = {"layers_per_cell": searched.layers_per_cell}  # as a resumed run does
    again = make_plan(Problem(UNEVEN, searched.pipeline.model_copy(update=cells), 1.0, Machine(ROOMY)))
    assert (again.step_s, again.schedule) == (searched.step_s, searched.schedule)


def test_cells_by_hand_stay():
    _, searched = chosen(UNEVEN, ROOMY, stages=2, micro_batches=6, remat="auto", layers_per_cell=(8, 2))
    assert searched.layers_per_cell == (8, 2)
    cells = {"virtual_stages": 2, "layers_per_cell": (3, 3, 2, 2)}  # two cells a stage
    plan, _ = chosen(UNEVEN, ROOMY, stages=2, micro_batches=6, remat="auto", **cells)
    assert (plan.layers_per_cell, plan.pipeline.virtual_stages) == ((3, 3, 2, 2), 2)


def test_without_recomputes_tight_memory_has_another_order():
    """In the memory of 1F1B nothing that defers by name fits."""
    costs, asked = [layer(split_s=0.0)] * 8, {"stages": 4, "micro_batches": 8, "remat": "never"}
    own = make_plan(Problem(costs, PipelineSettings(**asked, schedule="1f1b"), 1.0, Machine(ROOMY)))
    plan, searched = chosen(costs, max(cell.peak_bytes for cell in own.cells), **asked)
    assert searched.recomputes[0] == 0
    assert searched.step_s < plan.step_s <= own.step_s


@pytest.mark.slow
@settings(max_examples=6)
@given(layers, st.integers(2, 4), st.integers(1, 6), st.sampled_from(["never", "auto"]), st.sampled_from([None, 2]))
def test_in_less_memory_than_any_named_schedule_needs_auto_has_another_down_to_a_least_one(
    costs, stages, micro_batches, remat, cores
):
    asked = {"stages": min(stages, len(costs)), "micro_batches": micro_batches, "remat": remat}
    machine = Machine(1 << 50, cores=cores)
    named = [
        least_limit(Problem(costs, PipelineSettings(**asked, schedule=name, virtual_stages=cells), 1.0, machine), 1)
        for name, cells in CHOICES
        if not pipeline_errors(PipelineSettings(**asked, schedule=name, virtual_stages=cells), len(costs))
    ]
    given_settings = costs, PipelineSettings(**asked, schedule="auto"), 1.0
    least = least_limit(Problem(*given_settings, machine), 1)
    assert least <= min(named)
    for limit in {least, min(named) - 1} - {least - 1}:
        tight = replace(machine, memory_limit_bytes=limit)
        plan = make_plan(Problem(*given_settings, tight))
        searched = search_schedule(plan, Problem(*given_settings, tight))
        assert searched.step_s <= plan.step_s
        assert all(cell.peak_bytes <= limit for cell in searched.cells)
        if limit < min(named):
            assert plan.pipeline.schedule == searched.pipeline.schedule == "search"
            assert [each.is_of(searched.pipeline) for each in searched.alternatives if not each.fault] == [True]
    with pytest.raises(PlanError):
        make_plan(Problem(*given_settings, replace(machine, memory_limit_bytes=least - 1)))


def test_what_fits_by_no_name_is_searched():
    """K = 4, M = 8: 1F1B holds the inputs of 4 micro-batches on stage 0, which here are larger than all else."""
    costs = [layer(boundary_bytes=1_000, split_s=0.0)] * 8
    asked = {"stages": 4, "micro_batches": 8, "remat": "auto"}
    least = least_limit(Problem(costs, PipelineSettings(**asked, schedule="1f1b"), 1.0, Machine(ROOMY)), 1)
    with pytest.raises(PlanError):
        make_plan(Problem(costs, PipelineSettings(**asked, schedule="1f1b"), 1.0, Machine(least - 1)))
    plan, searched = chosen(costs, least - 1, **asked)
    assert plan.pipeline.schedule == searched.pipeline.schedule == "search"
    assert plan.recomputes[0] == 0
    assert plan.pipeline.remat == "auto"
    assert searched.step_s < plan.step_s / 2


def test_where_wide_tensors_wait_between_two_cells_of_a_stage_the_schedule_found_fits():
    """On each stage of a V; without a limit on how many wait there, searches found what did not fit."""
    weights, sizes = (1, 1, 1, 1, 1, 2, 1, 1, 3, 1, 2), (100, 400, 100, 10, 100, 100, 400, 100, 10, 100, 10)
    wide = [
        layer(weight, split_s=0.0, boundary_bytes=size, gradient_bytes=size)
        for weight, size in zip(weights, sizes, strict=True)
    ]
    asked = PipelineSettings(schedule="auto", stages=3, micro_batches=8, remat="auto")
    machine = Machine(memory_limit_bytes=UNCOUNTED_BYTES + 5_000, transport="nccl")
    assert peaks_of_all_cuts(Problem(wide, asked, 1.0, machine))


def test_an_update_that_fits_no_other_cut_ends_their_search():
    """Two layers with the first one's state would not leave the second one's update room."""
    costs = [layer(1, state_bytes=6_000), layer(1, state_bytes=6_000, update_peak_bytes=5_000), layer(2)]
    plan, searched = chosen(costs, UNCOUNTED_BYTES + 15_000, stages=2, micro_batches=4, remat="auto")
    assert searched is plan
    assert plan.layers_per_cell == (1, 2)


def test_what_is_not_left_to_the_plan_is_not_searched():
    asked = {"stages": 2, "micro_batches": 6}
    for given_settings in ({"schedule": "1f1b"}, {"schedule": "auto", "remat": "always"}):
        pipeline = PipelineSettings(**asked, **given_settings)
        plan = make_plan(Problem(UNEVEN, pipeline, 1.0, Machine(ROOMY)))
        assert search_schedule(plan, Problem(UNEVEN, pipeline, 1.0, Machine(ROOMY))) is plan


def test_the_name_of_a_searched_schedule_is_no_request():
    with pytest.raises(PlanError, match=r"use pipeline\.schedule=auto to have it searched"):
        make_plan(Problem(UNEVEN, PipelineSettings(stages=2, schedule="search"), 1.0, Machine(ROOMY)))


def test_rows_with_recomputes_are_taken_as_they_are():
    rows = "0F0 0F1 0R0 0B0 0R1 0B1", "1F0 1B0 1F1 1B1"
    assert recomputes(rows)
    pipeline = PipelineSettings(stages=2, micro_batches=2, schedule="csv", schedule_rows=rows)
    for remat in ("always", "except_last", "never", "auto"):
        plan = make_plan(Problem(UNEVEN, pipeline.model_copy(update={"remat": remat}), 1.0, Machine(ROOMY)))
        assert plan.recomputes == (2, 4)


def test_an_evaluation_of_more_micro_batches_than_a_file_has_begins_anew():
    config = ScheduleConfig("csv", rows=("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"))
    for actions in config.actions(2, 5, train=False):
        assert [str(action) for action in actions] == ["F0", "F1", "F2", "F3", "F4"]


@given(
    st.lists(st.integers(1, 20), min_size=4, max_size=12), st.sampled_from([v_shaped(2), (0, 1, 0, 1), (0, 0, 1, 1)])
)
def test_moving_layers_makes_stages_more_even_and_no_single_move_more_so(costs, cell_to_stage):
    def loads(cells):
        ends = [sum(cells[:at]) for at in range(len(cells) + 1)]
        found = [0, 0]
        for stage, begin, end in zip(cell_to_stage, ends, ends[1:], strict=False):
            found[stage] += sum(costs[begin:end])
        return max(found), sum(load * load for load in found)

    begun = [1, 1, 1, len(costs) - 3]
    cells = with_even_stages(begun, costs, cell_to_stage)
    assert sum(cells) == len(costs)
    assert min(cells) >= 1
    assert loads(cells) <= loads(begun)
    for at in range(3):
        for step in (-1, 1):
            moved = [*cells[:at], cells[at] + step, cells[at + 1] - step, *cells[at + 2 :]]
            assert min(moved) < 1 or loads(moved) >= loads(cells)
