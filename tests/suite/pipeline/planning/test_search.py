"""The search finds the optimum of small pipelines, and is never worse than what it is given; no schedule is faster than
the lower bound."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from suite.errors import SettingError
from suite.pipeline.model.cells import CellPlacement, v_shaped
from suite.pipeline.planning import lower_bound
from suite.pipeline.planning.costs import MessageCost
from suite.pipeline.planning.lower_bound import lower_bound_s
from suite.pipeline.planning.partial_schedule import SchedulingProblem
from suite.pipeline.planning.search import search
from suite.pipeline.planning.simulate import CellCost, Link, simulate
from suite.pipeline.planning.stage_memory import CellMemory, peak_bytes
from suite.pipeline.schedule.flow_control import flow_control
from suite.pipeline.schedule.remat import with_recomputes
from suite.pipeline.schedule.schedules import fill_drain, interleaved, one_by_one, one_forward_one_backward, zero_bubble
from suite.pipeline.schedule.validate import validate
from tests.suite.pipeline.planning.exhaustive import Case, least_step_s
from tests.suite.pipeline.planning.search_cases import check_optimum, random_case

unhurried = settings(deadline=None, max_examples=20)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("stages", "micro_batches", "cells"), [(2, 2, 1), (3, 3, 1), (1, 3, 2), (2, 2, 2), (3, 2, 2)])
def test_small_pipelines_run_an_optimal_schedule(stages, micro_batches, cells, seed):
    check_optimum(random_case(stages, micro_batches, cells, seed))


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 3), (2, 3), (3, 2), (3, 3)])
def test_no_order_of_one_cell_a_stage_needs_less_memory_than_one_micro_batch_at_a_time(stages, micro_batches, seed):
    case = random_case(stages, micro_batches, 1, seed)
    alone = one_by_one(stages, micro_batches, 1, recomputes=True)
    limit = max(peak_bytes(actions, *own) for actions, own in zip(alone, case.stage_memory, strict=True))
    assert least_step_s(replace(case, limit_bytes=limit), float("inf")) < float("inf")
    assert least_step_s(replace(case, limit_bytes=limit - 1), float("inf")) == float("inf")


def test_all_schedules_of_a_pipeline_drawn_by_hand():
    """F0 on both stages, then B on both; a second micro-batch fills the wait of stage 0, and W its end:

    stage 0   F0 F1 .  I0 W0 I1 W1
    stage 1   .  F0 I0 F1 I1 W0 W1
    """
    cost = CellCost(1, 1, 2, weight_grad_s=1)
    case = Case((0, 1), 2, (cost, cost), (CellMemory(*[0] * 10),) * 2, 0)
    assert least_step_s(case, float("inf")) == 7


@unhurried
@given(st.integers(0, 2**32))
def test_what_is_found_is_valid_fits_and_is_no_slower_than_any_generator(seed):
    rng = random.Random(seed)
    stages, cells, micro_batches = rng.randint(1, 4), rng.randint(1, 2), rng.randint(1, 6)
    if stages == 1:
        cells = 1
    costs = [_random_cost(rng, at, stages * cells) for at in range(stages * cells)]
    memory = [[CellMemory(*(rng.randint(0, 9) for _ in range(14))) for _ in range(cells)] for _ in range(stages)]
    link = Link(rng.choice([0.0, 1.0]), rng.choice([float("inf"), 1.0]))
    transport = rng.choice(["gloo", "nccl"])
    flow, limit = flow_control(transport, stages, cells), rng.choice([100, 150, 10**6])
    starts = [zero_bubble(stages, micro_batches, cells)]
    starts += (
        [fill_drain(stages, micro_batches), one_forward_one_backward(stages, micro_batches)]
        if cells == 1
        else [interleaved(stages, micro_batches, cells)]
    )
    peaks = [max(peak_bytes(a, *m, flow=flow) for a, m in zip(start, memory, strict=True)) for start in starts]
    given_s = [
        simulate(start, costs, link, flow).seconds for start, peak in zip(starts, peaks, strict=True) if peak <= limit
    ]
    problem = SchedulingProblem(CellPlacement(stages), micro_batches, costs, link, memory, limit, transport)
    found = search(problem, starts, seconds=0.05)
    if found is None:
        assert not given_s
        return
    validate(found, micro_batches, True, transport)
    assert all(peak_bytes(a, *m, flow=flow) <= limit for a, m in zip(found, memory, strict=True))
    found_s = simulate(found, costs, link, flow).seconds
    assert lower_bound_s(problem) * (1 - 1e-9) <= found_s <= min(given_s, default=float("inf"))


def _random_cost(rng, at, cells):
    backward_s = rng.randint(1, 9)
    far = ()
    if at + 2 < cells and rng.random() < 0.3:
        far = (MessageCost(rng.randint(at + 2, cells - 1), rng.randint(0, 5), rng.randint(0, 5)),)
    return CellCost(
        forward_s=rng.randint(1, 9),
        recompute_s=rng.randint(1, 9),
        backward_s=backward_s,
        update_s=0,
        activation_bytes=rng.randint(0, 5),
        gradient_bytes=rng.randint(0, 5),
        far_messages=far,
        weight_grad_s=rng.randint(0, backward_s),
        split_s=rng.randint(0, 2),
    )


def test_equal_cells_of_a_v_need_nothing_beyond_the_bound():
    """Two half stages a stage: the last stage waits K - 1 half forwards, then no stage waits."""
    stages, micro_batches = 4, 8
    costs, placement = [CellCost(1, 1, 2, weight_grad_s=1)] * 8, CellPlacement(stages, v_shaped(stages))
    memory = [[CellMemory(0, 0, 1, *[0] * 7)] * 2] * stages
    problem = SchedulingProblem(placement, micro_batches, costs, Link(), memory, limit_bytes=24)
    assert lower_bound_s(problem) == micro_batches * 6 + stages - 1
    assert (
        simulate(search(problem), costs, cell_to_stage=placement.cell_to_stage).seconds
        == micro_batches * 6 + stages - 1
    )


def test_stages_of_several_cells_without_room_for_their_graphs_recompute_them():
    """In little more than the memory of the interleaved schedule that recomputes all, search alone is no slower."""
    stages, micro_batches = 4, 32
    placement, costs = CellPlacement(stages, (*range(stages),) * 2), [CellCost(1, 1, 2, weight_grad_s=1)] * 8
    named = [with_recomputes(actions, [0, 0]) for actions in interleaved(stages, micro_batches, 2)]
    cells = [CellMemory(0, 1, 10, 0, 10, *[0] * 5)] * 2
    flow = flow_control("gloo", stages, 2)
    limit = max(peak_bytes(actions, *cells, flow=flow) for actions in named)
    found = search(SchedulingProblem(placement, micro_batches, costs, Link(), [cells] * stages, limit + 5), seconds=0.5)
    own, given = (
        simulate(schedule, costs, cell_to_stage=placement.cell_to_stage).seconds for schedule in (found, named)
    )
    assert own <= given


def test_the_same_arguments_find_the_same_schedule():
    costs = [CellCost(1.1, 1.0, 2 + 0.1 * at, weight_grad_s=0.9) for at in range(4)]
    memory = [[CellMemory(0, 0, 1, *[0] * 7)]] * 4
    problem = SchedulingProblem(CellPlacement(4), 6, costs, Link(), memory, limit_bytes=3)
    one, other = (search(problem, seconds=0.1, seed=5) for _ in range(2))
    assert one == other


def test_nothing_is_found_where_not_even_one_micro_batch_fits():
    memory = [[CellMemory(10, 1, 1, *[0] * 7)]] * 2
    assert search(SchedulingProblem(CellPlacement(2), 2, [CellCost(1, 1, 2)] * 2, Link(), memory, 10)) is None


@pytest.mark.parametrize("seconds", [0, -1])
def test_a_search_without_time_is_refused(seconds):
    problem = SchedulingProblem(CellPlacement(1), 1, [CellCost(1, 1, 2)], Link(), [[CellMemory(*[0] * 10)]], 0)
    with pytest.raises(SettingError, match="more than 0"):
        search(problem, seconds=seconds)


def test_where_memory_holds_one_graph_others_run_their_forward_again():
    """Of 8 micro-batches of F = 4 and B = 2 on 4 stages, the roomy bound is 8 (4 + 2) + 3 (4 + 2). A graph of stage 1
    is there for 2 (4 + 2) + 2, so of T seconds without head 4 and tail 2, (T - 6) / 14 are kept, and
    T = 6 + 8 (4 + 2) + 4 (8 - (T - 6) / 14)."""
    costs = [CellCost(4, 4, 2)] * 4
    memory = [[CellMemory(0, 0, 1, 0, 1, *[0] * 5)]] * 4
    given = CellPlacement(4), 8, costs, Link(), memory
    roomy, tight = (lower_bound_s(SchedulingProblem(*given, limit)) for limit in (8, 1))
    assert roomy == 66
    assert tight == pytest.approx(68 + 2 / 9, rel=1e-5)


def test_the_most_graphs_that_fit_are_counted_or_where_the_ways_are_many_bounded_by_the_room():
    assert lower_bound._fullest(10, (4,), 5) == 8
    assert lower_bound._fullest(10, (4, 3), 5) == 10  # 4 + 3 + 3
    assert lower_bound._fullest(100, (4, 3), 5) == 35
    lower_bound._fullest.cache_clear()
    assert lower_bound._fullest(2_000, (7, 11, 13, 17), 64) == 2_000  # of 65 ** 4 ways none is tried
    assert lower_bound._fullest.cache_info().misses == 1
