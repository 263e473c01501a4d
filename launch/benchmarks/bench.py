"""``make bench NAME=...``: compares the suite with other pipelines on the same work."""

from __future__ import annotations

import json
import math
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments.benchmark.cases import FEED, PAIR, Case, cases, ideal_fill_drain_s, turn_order
from experiments.benchmark.peers.peer import Entrant
from experiments.benchmark.peers.workload import BenchWorkload
from experiments.benchmark.report import entrants_table, page, summary
from experiments.benchmark.results import Result, Score, refused
from launch.backends.processes import run_processes
from launch.benchmarks.entrant_processes import BenchInputs, EntrantProcesses, Observation
from launch.benchmarks.feed import feed_table
from launch.benchmarks.worker import reference_gradients, tensor_name
from launch.runs.store import RUNS
from launch.worker.cgroups import cpu_limit
from launch.worker.devices import cpu_model
from launch.worker.measure import LayerMeasurements, measure_layers
from suite.errors import PlanError
from suite.pipeline.planning.costs import LayerCost
from suite.pipeline.planning.devices import Machine
from suite.pipeline.planning.memory import UNCOUNTED_BYTES
from suite.pipeline.planning.partition import partition
from suite.pipeline.planning.plan import Plan, make_plan

FOLDER = RUNS / "tables"


def bench(name: str, console: Console) -> list[str]:
    """Runs the cases of a name, prints a summary and writes a page for each; returns a sentence for each failure.

    Raises SettingError for an unknown name.
    """
    if name == FEED:
        feed = feed_table(console)
        console.print(feed.rich_table() if console.is_terminal else feed.markdown())
        console.print(f"written: {', '.join(map(str, feed.write(FOLDER)))}")
        return []
    requested_cases = cases(name)
    (FOLDER / "bench.log").unlink(missing_ok=True)
    from launch.benchmarks.entrants import ENTRANTS

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
    """Runs one case with these entrants; measures the layers' costs first if they are not given."""
    work = case.work
    begin = time.monotonic()
    console.print(f"{case.title}: measuring layer costs and reference gradients")
    FOLDER.mkdir(parents=True, exist_ok=True)
    log = FOLDER.resolve() / "bench.log"
    costs = _costs(work, log) if costs is None else costs
    plans, plan_errors = make_plans(work, costs, entrants)
    accepted, left_out = [], []
    for entrant in entrants:
        if entrant.workloads and work.name not in entrant.workloads:
            continue
        reason = plan_errors.get(entrant.name) or entrant.refuse(work)
        if reason is None:
            accepted.append(entrant)
        else:
            left_out.append(refused(entrant, reason))
    executed_plans = {name: (plan.layers_per_cell, plan.schedule_config) for name, plan in plans.items()}
    seconds = [cost.forward_s + cost.backward_s for cost in costs]
    cells = {
        count: tuple(partition(seconds, count))
        for count in {entrant.virtual_stages * work.stages for entrant in accepted} | {work.stages}
    }
    parameters = _parameters(work)

    def scored(entrant: Entrant, observed: Sequence[Observation]) -> Score:
        recomputes_forward = plans[entrant.name].recomputes[0] > 0 if entrant.name in plans else entrant.recomputes
        ideal_s = ideal_fill_drain_s(costs, cells[work.stages], work.micro_batches, recomputes_forward)
        found = score(entrant, observed, parameters, ideal_s)
        return _add_plan(found, plans, entrant) if entrant.ours else found

    with tempfile.TemporaryDirectory() as folder:
        truths = {
            threads: Path(folder) / f"{threads}.safetensors" for threads in {e.threads_of(work) for e in accepted}
        }
        for threads, file in truths.items():
            run_processes(reference_gradients, 1, work, file, threads)
        console.print(f"{case.title}: starting {len(accepted)} entrants and comparing their gradients")
        with EntrantProcesses(BenchInputs(case, cells, executed_plans, truths, log), accepted) as processes:
            scores = tuple(scored(entrant, processes.observed[entrant.name]) for entrant in accepted)
            result = Result(case, cells[work.stages], tuple(costs), scores)
            result = run_rounds(processes.turn, result, begin + case.time_limit_s, console)
    console.print(f"{case.title}: {time.monotonic() - begin:.0f} s in all")
    return replace(result, scores=(*result.scores, *left_out))


def run_rounds(
    turn: Callable[[str], tuple[float, ...]],
    result: Result,
    until: float,
    console: Console,
    now: Callable[[], float] = time.monotonic,
) -> Result:
    """Returns the result with pairs of rounds: until every ratio is known, or the next pair would end after ``until``.

    ``turn`` runs an entrant's turn and returns the seconds of its steps.
    """
    names = {score.entrant for score in result.scores}
    seconds_of: dict[str, float] = {}
    for first in count(step=PAIR):
        if not names or (first > 0 and now() + PAIR * sum(seconds_of[name] for name in names) > until):
            break
        for number in range(first, first + PAIR):
            steps = {}
            for name in turn_order(names, number):
                begin = now()
                steps[name] = turn(name)
                seconds_of[name] = now() - begin
            result = result.with_round(number, steps)
        console.print(
            f"{result.case.title}: {first + PAIR} rounds, the last with {len(names)} entrants; "
            f"{len(result.open_pairs)} ratios not known yet, {max(0.0, until - now()):.0f} s left"
        )
        names = result.needed
    return result


def make_plans(
    work: BenchWorkload, costs: Sequence[LayerCost], entrants: Sequence[Entrant]
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
        try:
            plans[entrant.name] = make_plan(costs, pipeline, GRADIENT_BYTES, Machine(memory_limit_bytes=room))
        except PlanError as fault:
            plan_errors[entrant.name] = "; ".join(fault.errors)
    return plans, plan_errors


GRADIENT_BYTES = 4.0
"""Bytes that a step allocates for each parameter."""


def peak_of(plan: Plan) -> int:
    """Returns the peak memory of a plan's largest stage."""
    return max(stage.peak_bytes for stage in plan.cells)


def _add_plan(found: Score, plans: dict[str, Plan], entrant: Entrant) -> Score:
    """Returns the score with the plan's numbers."""
    plan = plans[entrant.name]
    recomputes_forward, whole = plan.recomputes
    cap = peak_of(plans[entrant.memory_of]) - UNCOUNTED_BYTES if entrant.memory_of else None
    share = f"{recomputes_forward} of {whole} forwards recomputed"
    remark = f"{plan.schedule_config.schedule}, {share}, {plan.step_s:.3f} s simulated"
    if cap is not None:
        remark += f", at most {cap / 2**20:.1f} MiB"
    # even with full recomputation a schedule keeps one micro-batch a stage
    partly = 0 < recomputes_forward < whole - plan.pipeline.stages
    return replace(
        found, memory_limit_bytes=cap, simulated_s=plan.step_s, recomputes=None if partly else recomputes_forward > 0,
        ideal_s=math.nan if partly else found.ideal_s, remark=found.remark or remark,
    )  # fmt: skip


def score(entrant: Entrant, observed: Sequence[Observation], parameters: set[str], ideal_s: float) -> Score:
    """Merges the workers' observations of one entrant. A missing gradient counts as infinitely wrong."""
    differences = [value for one in observed for value in one.differences.values()]
    whole = {name for one in observed for name in one.differences} == parameters
    worst = max((math.inf if math.isnan(value) else value for value in differences), default=math.inf)
    return Score(
        entrant.name, entrant.ours, entrant.recomputes, peak_bytes=max(one.peak for one in observed),
        difference=worst if whole else math.inf, ideal_s=ideal_s,
    )  # fmt: skip


def machine() -> dict[str, Any]:
    """Returns what the times depend on besides the code."""
    return {
        "cpu": cpu_model(), "cores": cpu_limit(), "threads_a_process": 1, "system": platform.platform(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "deepspeed")},
    }  # fmt: skip


def _costs(work: BenchWorkload, log: Path) -> Sequence[LayerCost]:
    """Returns the layers' costs of the slowest process; as many measure concurrently as will compute concurrently."""
    found: list[LayerMeasurements] = run_processes(measure_layers, work.measuring_processes, work, 1, False, log)
    return max((one.costs for one in found), key=lambda costs: sum(c.forward_s + c.backward_s for c in costs))


def _parameters(work: BenchWorkload) -> set[str]:
    layers, _ = work.build()
    return {tensor_name(index, name) for index, layer in enumerate(layers) for name, _ in layer.named_parameters()}


def _write(results: Sequence[Result]) -> Path:
    path = FOLDER / "bench.json"
    record = {"machine": machine(), "cases": [result.record() for result in results]}
    path.write_text(json.dumps(record, indent=1))
    return path
