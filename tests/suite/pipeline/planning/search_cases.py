"""Random small pipelines, whose optimum is known from all their schedules."""

import random

import pytest

from suite.pipeline.model.cells import CellPlacement, v_shaped
from suite.pipeline.planning.lower_bound import lower_bound_s
from suite.pipeline.planning.partial_schedule import SchedulingProblem
from suite.pipeline.planning.search import search
from suite.pipeline.planning.simulate import CellCost, Link, simulate
from suite.pipeline.planning.stage_memory import CellMemory
from tests.suite.pipeline.planning.exhaustive import Case, least_step_s


def random_case(stages: int, micro_batches: int, cells: int, seed: int) -> Case:
    """Returns a pipeline of small whole costs and bytes; every second one with two cells a stage is a V."""
    rng = random.Random(f"{stages} {micro_batches} {cells} {seed}")
    count = stages * cells
    cell_to_stage = v_shaped(stages) if cells == 2 and seed % 2 else tuple(at % stages for at in range(count))
    costs, memory = [], []
    for _ in range(count):
        recompute_s, backward_s, activations = rng.randint(1, 5), rng.randint(1, 8), rng.randint(1, 6)
        forward_s = max(1, recompute_s + rng.choice([0, 0, 1, -1]))
        weight_grad_s = rng.choice([0, rng.randint(0, backward_s)])
        split_s = rng.choice([0, 0, 1])
        costs.append(CellCost(forward_s, recompute_s, backward_s, weight_grad_s=weight_grad_s, split_s=split_s))
        memory.append(
            CellMemory(
                fixed_bytes=rng.randint(0, 5),
                input_bytes=rng.randint(0, 2),
                activation_bytes=activations,
                forward_peak_bytes=rng.randint(0, activations),
                graph_peak_bytes=activations + rng.randint(0, 3),
                backward_peak_bytes=rng.randint(0, 4),
                update_peak_bytes=0,
                sent_activation_bytes=0,
                received_gradient_bytes=0,
                sent_gradient_bytes=0,
                deferred_bytes=rng.randint(0, activations + 1),
            )
        )
    case = Case(cell_to_stage, micro_batches, tuple(costs), tuple(memory), 0)
    full = max(
        sum(cell.fixed_bytes + micro_batches * (cell.activation_bytes + cell.input_bytes) + 10 for cell in stage)
        for stage in case.stage_memory
    )
    limit = int(full * rng.choice([0.3, 0.5, 0.7, 1, 2]))
    return Case(cell_to_stage, micro_batches, tuple(costs), tuple(memory), limit)


def check_optimum(case: Case, excess: float = 1) -> None:
    """Checks that the search finds the fastest of all schedules, or one that is ``excess`` times as long, and that the
    fastest is not below the bound."""
    placement = CellPlacement(case.stages, case.cell_to_stage)
    problem = SchedulingProblem(placement, case.micro_batches, case.costs, Link(), case.stage_memory, case.limit_bytes)
    found = search(problem)
    step_s = simulate(found, case.costs, cell_to_stage=case.cell_to_stage).seconds if found else float("inf")
    least_s = least_step_s(case, step_s + 1)  # so the enumeration has to find a schedule as fast as this one
    assert step_s == pytest.approx(least_s * excess), f"{step_s} s found, {least_s} s is the shortest step: {case}"
    assert lower_bound_s(problem) <= least_s * (1 + 1e-9), f"the bound exceeds the optimum: {case}"
