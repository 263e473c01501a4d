"""``make bench NAME=...``: compares the suite with other pipelines on the same work."""

from __future__ import annotations

import json
import math
import platform
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from rich.console import Console

from launch.backends.processes import run_processes
from launch.runs.store import RUNS
from launch.worker.devices import cpu_model
from launch.worker.measure import LayerMeasurements, measure_layers
from suite.cgroups import cpu_limit
from suite.errors import PlanError
from suite.pipeline.planning.costs import LayerCost
from suite.pipeline.planning.devices import Machine
from suite.pipeline.planning.fit import Problem
from suite.pipeline.planning.memory import UNCOUNTED_BYTES
from suite.pipeline.planning.partition import partition
from suite.pipeline.planning.plan import Plan, make_plan
from suite.pipeline.planning.schedule_choice import search_schedule
from suite.pipeline.planning.simulate import Link
from tests.bench.cases import Case, cases, ideal_fill_drain_s, turn_order
from tests.bench.entrants import ENTRANTS
from tests.bench.peers.peer import Entrant
from tests.bench.peers.workload import BenchWorkload
from tests.bench.report import entrants_table, page, summary
from tests.bench.results import Result, Score
from tests.bench.worker import BenchInputs, Observation, reference_gradients, run_turns, tensor_name
from tests.quick_measuring import estimates

FOLDER = RUNS / "tables"


def bench(name: str, console: Console) -> list[str]:
    """Runs the cases of a name, prints a summary and writes a page for each; returns a sentence for each failure.

    Raises SettingError for an unknown name.
    """
    requested_cases = cases(name)
    (FOLDER / "bench.log").unlink(missing_ok=True)
    results, failures = [], []
    for case in requested_cases:
        result = run(case, ENTRANTS, console)
        results.append(result)
        for table in (summary(result), entrants_table(result)):
            if table.rows:
                console.print(table.rich_table() if console.is_terminal else table.markdown())
        for path in [*page(result).write(FOLDER), _write(results)]:
            console.print(f"written: {path}")
        failures += [
            f"{score.entrant} in {case.title}: peak memory of {score.peak_bytes} bytes exceeds the planned "
            f"{score.memory_limit_bytes}"
            for score in result.scores
            if score.over_memory_limit
        ]
        failures += [
            f"{score.entrant} in {case.title}: gradients differ from those of a single process by "
            f"{score.difference:.2g} of their largest value"
            for score in result.wrong
        ]
    return failures


def run(case: Case, entrants: Sequence[Entrant], console: Console, costs: Sequence[LayerCost] | None = None) -> Result:
    """Runs one case with these entrants; measures the layers' costs and the link first if no costs are given."""
    work = case.work
    begin = time.monotonic()
    console.print(f"{case.title}: measuring layer costs and reference gradients")
    FOLDER.mkdir(parents=True, exist_ok=True)
    log = FOLDER.resolve() / "bench.log"
    costs, link = _costs(case, log) if costs is None else (costs, Link())
    entrants = [entrant for entrant in entrants if work.name in (entrant.workloads or [work.name])]
    plans, reasons = make_plans(work, costs, entrants, link)
    reasons |= {entrant.name: reason for entrant in entrants if (reason := entrant.refused.get(work.name))}
    accepted = [entrant for entrant in entrants if entrant.name not in reasons]
    names = [entrant.name for entrant in accepted]
    turns = (*names, *(name for number in range(case.rounds) for name in turn_order(names, number)))
    executed_plans = {name: (plan.layers_per_cell, plan.schedule_config) for name, plan in plans.items()}
    seconds = [cost.forward_s + cost.backward_s for cost in costs]
    counts = {work.stages} | {entrant.virtual_stages * work.stages for entrant in accepted}
    cells = {count: tuple(partition(seconds, count)) for count in counts}
    with tempfile.TemporaryDirectory() as folder:
        truths = {}
        for threads in {entrant.threads_of(work) for entrant in accepted}:
            truths[threads] = Path(folder) / f"{threads}.safetensors"
            run_processes(reference_gradients, 1, work, truths[threads], threads)
        console.print(f"{case.title}: starting {len(accepted)} entrants and comparing their gradients")
        found = run_turns(BenchInputs(case, turns, cells, executed_plans, truths, log), accepted, console)
    parameters = _parameters(work)
    scores = []
    for entrant in accepted:
        scored = score(entrant, found[entrant.name], parameters, plans)
        if scored.recomputes is not None:
            ideal_s = ideal_fill_drain_s(costs, cells[work.stages], work.micro_batches, scored.recomputes)
            scored = replace(scored, ideal_s=ideal_s)
        scores.append(scored)
    for entrant in entrants:
        if entrant.name in reasons:
            remark = f"not run: {reasons[entrant.name]}"
            scores.append(Score(entrant.name, entrant.settings is not None, entrant.recomputes, remark=remark))
    console.print(f"{case.title}: {time.monotonic() - begin:.0f} s in all")
    return Result(case, cells[work.stages], tuple(costs), tuple(scores))


def make_plans(
    work: BenchWorkload, costs: Sequence[LayerCost], entrants: Sequence[Entrant], link: Link
) -> tuple[dict[str, Plan], dict[str, str]]:
    """Returns the plans of the suite's entrants by name, and the reasons of those without a plan. An entrant that is
    limited to another's memory is planned after it. Plans count only what a step allocates: gradients and temporaries.
    """
    plans: dict[str, Plan] = {}
    plan_errors: dict[str, str] = {}
    for entrant in sorted(entrants, key=lambda one: one.memory_of is not None):
        if entrant.settings is None:
            continue
        pipeline = work.pipeline.model_copy(update=dict(entrant.settings))
        if entrant.memory_of in plan_errors:
            plan_errors[entrant.name] = f"{entrant.memory_of} has no plan"
            continue
        room = peak_of(plans[entrant.memory_of]) if entrant.memory_of else 1 << 60
        gradient_bytes = 4.0  # all that a step allocates for a parameter
        asked = costs, pipeline, gradient_bytes, Machine(memory_limit_bytes=room, link=link)
        try:
            plans[entrant.name] = search_schedule(make_plan(Problem(*asked)), Problem(*asked))
        except PlanError as fault:
            plan_errors[entrant.name] = "; ".join(fault.errors)
    return plans, plan_errors


def peak_of(plan: Plan) -> int:
    return max(stage.peak_bytes for stage in plan.cells)


def score(entrant: Entrant, found: Sequence[Observation], parameters: set[str], plans: Mapping[str, Plan]) -> Score:
    """Merges what the workers found of one entrant, and its plan if it has one. A missing gradient counts as infinitely
    wrong."""
    differences = [math.inf if math.isnan(value) else value for one in found for value in one.differences.values()]
    is_whole = {name for one in found for name in one.differences} == parameters
    rounds = tuple(
        tuple(max(of_step) for of_step in zip(*of_round, strict=True))
        for of_round in zip(*(one.rounds for one in found), strict=True)
    )
    merged = Score(
        entrant.name,
        entrant.settings is not None,
        entrant.recomputes,
        rounds,
        max(one.peak for one in found),
        difference=max(differences) if is_whole else math.inf,
    )
    plan = plans.get(entrant.name)
    if plan is None:
        return merged
    recomputes_forward, whole = plan.recomputes
    cap = peak_of(plans[entrant.memory_of]) - UNCOUNTED_BYTES if entrant.memory_of else None
    share = f"{recomputes_forward} of {whole} forwards recomputed"
    remark = f"{plan.schedule_config.schedule}, {share}, {plan.step_s:.3f} s simulated"
    if cap is not None:
        remark += f", at most {cap / 2**20:.1f} MiB"
    # even with full recomputation a schedule keeps one micro-batch a stage
    partly = 0 < recomputes_forward < whole - plan.pipeline.stages
    recomputes = None if partly else recomputes_forward > 0
    return replace(merged, memory_limit_bytes=cap, simulated_s=plan.step_s, recomputes=recomputes, remark=remark)


def _costs(case: Case, log: Path) -> tuple[Sequence[LayerCost], Link]:
    """Returns the layers' costs of the slowest process, and the link between two; as many measure concurrently as will
    compute concurrently."""
    work = case.work
    processes = work.stages * work.replicas if case.own_processes else min(2, work.stages)
    found: list[LayerMeasurements] = run_processes(measure_layers, processes, work, estimates(work), 1, False, log)
    slowest = max(found, key=lambda one: sum(cost.forward_s + cost.backward_s for cost in one.costs))
    return slowest.costs, found[0].link


def _parameters(work: BenchWorkload) -> set[str]:
    layers, _ = work.build()
    return {tensor_name(index, name) for index, layer in enumerate(layers) for name, _ in layer.named_parameters()}


def _write(results: Sequence[Result]) -> Path:
    """Writes the results, and what their times depend on besides the code."""
    machine = {
        "cpu": cpu_model(),
        "cores": cpu_limit(),
        "threads_a_process": 1,
        "system": platform.platform(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "deepspeed")},
    }
    path = FOLDER / "bench.json"
    path.write_text(json.dumps({"machine": machine, "cases": [result.record() for result in results]}, indent=1))
    return path
