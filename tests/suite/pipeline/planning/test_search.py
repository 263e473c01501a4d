"""What policies find is valid, fits, and is close to the shortest step; no schedule is faster than the lower bound."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from suite.pipeline.model.cells import CellPlacement, v_shaped
from suite.pipeline.planning import search as search_module
from suite.pipeline.planning.costs import MessageCost
from suite.pipeline.planning.lower_bound import lower_bound_s
from suite.pipeline.planning.policies import CellsProblem
from suite.pipeline.planning.search import Search
from suite.pipeline.planning.simulate import CellCost, Link, simulate
from suite.pipeline.planning.stage_bytes import CellBytes, Sent, peak_bytes
from suite.pipeline.schedule.flow_control import GLOO, flow_control
from suite.pipeline.schedule.remat import with_recomputes
from suite.pipeline.schedule.schedules import interleaved, one_by_one
from suite.pipeline.schedule.validate import validate
from tests.suite.pipeline.planning.exhaustive import least_step_s
from tests.suite.pipeline.planning.search_cases import problem_of, random_case

GRAPH = CellBytes(activation_bytes=1)


def searched(problem):
    """Returns the search of the family of policies."""
    search = Search(problem, lower_bound_s(problem))
    search.try_family()
    return search


def seconds(schedule, problem):
    return simulate(schedule, problem.costs, problem.link, problem.flow, problem.placement.cell_to_stage).seconds


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 3), (2, 3), (3, 2)])
def test_no_order_of_one_cell_a_stage_needs_less_memory_than_one_micro_batch_at_a_time(stages, micro_batches, seed):
    case = random_case(stages, micro_batches, 1, seed)
    alone = one_by_one(stages, micro_batches, 1, recomputes=True)
    limit = max(peak_bytes(actions, own, GLOO) for actions, own in zip(alone, case.stage_bytes, strict=True))
    assert least_step_s(replace(case, limit_bytes=limit), float("inf")) < float("inf")
    assert least_step_s(replace(case, limit_bytes=limit - 1), float("inf")) == float("inf")


def random_problem(rng):
    """Returns a random pipeline whose messages take time and memory, and may go past stages."""
    case = random_case(rng.randint(2, 4), rng.randint(1, 6), rng.randint(1, 2), rng.randrange(10**6))
    problem, costs, count = problem_of(case), [], len(case.costs)
    for at, cost in enumerate(case.costs):
        skips = [rng.randint(at + 2, count - 1)] if at + 2 < count and rng.random() < 0.3 else []
        far = tuple(MessageCost(to, rng.randint(0, 5), rng.randint(0, 5)) for to in skips)
        sizes = {"activation_bytes": rng.randint(0, 5), "gradient_bytes": rng.randint(0, 5)}
        costs.append(replace(cost, far_messages=far, **sizes))
    sizes = {"received_gradient_bytes": rng.randint(0, 9), "update_peak_bytes": rng.randint(0, 9)}
    sizes["sent"] = Sent(1, rng.randint(1, 9)), Sent(-1, 5), Sent(2, 3)
    return replace(
        problem,
        costs=costs,
        link=Link(rng.choice([0.0, 1.0]), rng.choice([float("inf"), 1.0])),
        stage_bytes=[[replace(cell, **sizes) for cell in cells] for cells in problem.stage_bytes],
        limit_bytes=problem.limit_bytes + rng.choice([20, 60]),
        transport=rng.choice(["gloo", "nccl"]),
        may_recompute=rng.random() < 0.5,
    )


@settings(max_examples=20)
@given(st.integers(0, 2**32))
def test_what_is_found_is_valid_fits_and_takes_no_longer_than_it_was_played(seed):
    problem = random_problem(random.Random(seed))
    search = searched(problem)
    if search.best is None:
        return
    found = search.schedule()
    pairs = [(at, far.to) for at, cost in enumerate(problem.costs) for far in cost.far_messages]
    crossing = [pair for pair in pairs if problem.placement.crosses(*pair)]
    validate(found, problem.micro_batches, True, problem.transport, crossing, problem.placement.cell_to_stage)
    peaks = [peak_bytes(actions, own, problem.flow) for actions, own in zip(found, problem.stage_bytes, strict=True)]
    assert max(peaks) <= problem.limit_bytes
    assert problem.may_recompute or not any(action.kind == "R" for actions in found for action in actions)
    assert lower_bound_s(problem) * (1 - 1e-9) <= seconds(found, problem) <= search.step_s * (1 + 1e-9)


def test_equal_cells_of_a_v_need_nothing_beyond_the_bound():
    """Two half stages a stage: the last stage waits K - 1 half forwards, then no stage waits."""
    stages, micro_batches = 4, 8
    costs, placement = [CellCost(1, 1, 2, weight_grad_s=1)] * 8, CellPlacement(stages, v_shaped(stages))
    problem = CellsProblem(placement, micro_batches, costs, Link(), [[GRAPH] * 2] * stages, limit_bytes=24)
    assert lower_bound_s(problem) == micro_batches * 6 + stages - 1
    assert seconds(searched(problem).schedule(), problem) == micro_batches * 6 + stages - 1


def test_stages_of_several_cells_without_room_for_their_graphs_recompute_them():
    """In little more than the memory of the interleaved schedule that recomputes all, policies are no slower."""
    stages, micro_batches = 4, 32
    placement, costs = CellPlacement(stages), [CellCost(1, 1, 2, weight_grad_s=1)] * 8
    named = [with_recomputes(actions, [0, 0]) for actions in interleaved(stages, micro_batches, 2)]
    cells = [CellBytes(input_bytes=1, activation_bytes=10, graph_peak_bytes=10)] * 2
    limit = max(peak_bytes(actions, cells, flow_control("gloo", stages, 2)) for actions in named)
    problem = CellsProblem(placement, micro_batches, costs, Link(), [cells] * stages, limit + 5)
    assert seconds(searched(problem).schedule(), problem) <= seconds(named, problem)


BACKWARDS_DIFFER = [CellCost(1.1, 1.0, 2 + 0.1 * at, weight_grad_s=0.9) for at in range(4)]
UNEQUAL = CellsProblem(CellPlacement(4), 6, BACKWARDS_DIFFER, Link(), [[GRAPH]] * 4, limit_bytes=3)


def test_the_same_arguments_find_the_same_schedule_and_a_climb_none_that_is_slower(monkeypatch):
    monkeypatch.setattr(search_module, "ACTIONS_WITHOUT_GAIN", 3_000)
    one, other = searched(UNEQUAL), searched(UNEQUAL)
    of_family_s = one.step_s
    for search in (one, other):
        search.climb()
    assert one.schedule() == other.schedule()
    assert one.step_s <= of_family_s


def test_a_climb_ends_a_while_after_its_last_gain(monkeypatch):
    monkeypatch.setattr(search_module, "ACTIONS_WITHOUT_GAIN", 2_000)
    search = searched(UNEQUAL)
    since_gain, play = [0], search._play

    def counted(policy):
        before_s, found = search.step_s, play(policy)
        since_gain[0] = 0 if search.step_s < before_s else since_gain[0] + found[1]
        return found

    search._play = counted
    search.climb()
    assert 2_000 <= since_gain[0] < 2_100


@pytest.mark.parametrize("limit", [10, 12, 13])  # not even its inputs, not its graph, not the update
def test_nothing_is_found_where_not_even_one_micro_batch_fits(limit):
    memory = [[CellBytes(fixed_bytes=10, input_bytes=1, activation_bytes=1, update_peak_bytes=4)]] * 2
    problem = CellsProblem(CellPlacement(2), 2, [CellCost(1, 1, 2)] * 2, Link(), memory, limit)
    search = searched(problem)
    search.climb()
    assert search.best is None
