"""Random small pipelines, whose shortest step is known from all their schedules."""

import math
import random
from dataclasses import replace

from suite.pipeline.model.cells import CellPlacement, v_shaped
from suite.pipeline.planning.lower_bound import lower_bound_s
from suite.pipeline.planning.policies import CellsProblem
from suite.pipeline.planning.search import Search
from suite.pipeline.planning.simulate import CellCost, Link
from suite.pipeline.planning.stage_bytes import CellBytes
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
        cell = CellBytes(
            fixed_bytes=rng.randint(0, 5),
            input_bytes=rng.randint(0, 2),
            activation_bytes=activations,
            forward_peak_bytes=rng.randint(0, activations),
            graph_peak_bytes=activations + rng.randint(0, 3),
            backward_peak_bytes=rng.randint(0, 4),
            deferred_bytes=rng.randint(0, activations + 1),
        )
        memory.append(replace(cell, split_peak_bytes=max(0, cell.deferred_bytes - activations)))
    case = Case(cell_to_stage, micro_batches, tuple(costs), tuple(memory), 0)
    full = max(
        sum(cell.fixed_bytes + micro_batches * (cell.activation_bytes + cell.input_bytes) + 10 for cell in stage)
        for stage in case.stage_bytes
    )
    limit = int(full * rng.choice([0.3, 0.5, 0.7, 1, 2]))
    return Case(cell_to_stage, micro_batches, tuple(costs), tuple(memory), limit)


def problem_of(case: Case) -> CellsProblem:
    placement = CellPlacement(case.stages, case.cell_to_stage)
    return CellsProblem(placement, case.micro_batches, case.costs, Link(), case.stage_bytes, case.limit_bytes)


def excess_over_optimum(case: Case) -> float:
    """Returns the step that the family of policies finds, as a multiple of the shortest of all schedules: infinity if
    it finds none, 1 if there is none. Checks that the shortest is not below the bound."""
    problem = problem_of(case)
    search = Search(problem, lower_bound_s(problem))
    search.try_family()
    found_s = search.step_s if search.best is not None else math.inf
    least_s = least_step_s(case, found_s + 1)  # so the enumeration has to find a schedule as fast as this one
    assert lower_bound_s(problem) <= least_s * (1 + 1e-9), f"the bound exceeds the optimum: {case}"
    assert least_s <= found_s, f"a step is shorter than the optimum: {case}"
    return 1.0 if found_s == least_s else found_s / least_s
