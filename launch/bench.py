"""``make bench NAME=...``: the suite and its peers on the same work, in the same call."""

from __future__ import annotations

import json
import math
import platform
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from experiments.benchmark import Case, Result, Score, cases, limit, order, refused
from experiments.peers.peer import Contender
from experiments.peers.work import Work
from launch.error_log import log_error
from launch.follow import Tail
from launch.limits import cores
from launch.runs import RUNS
from suite.errors import PlanError
from suite.pipeline.costs import LayerCost
from suite.pipeline.memory import SUNDRIES
from suite.pipeline.partition import partition
from suite.pipeline.plan import Machine, Plan, make_plan
from suite.pipeline.recipe import Recipe
from suite.training.recurring import Recurring

if TYPE_CHECKING:
    from launch.contest import Seen

FOLDER = RUNS / "tables"

DEADLINE_S = 3600.0


def bench(name: str, console: Console) -> list[str]:
    """Runs the cases of a name, prints a table each and writes them down; returns what was wrong, in sentences.

    Raises SettingError for an unknown name.
    """
    asked = cases(name)
    (FOLDER / "bench.log").unlink(missing_ok=True)
    from launch.contenders import CONTENDERS

    results, wrong = [], []
    for case in asked:
        result = run(case, CONTENDERS, console)
        results.append(result)
        table = result.table()
        console.print(table.shown() if console.is_terminal else table.markdown())
        for path in [*table.write(FOLDER), _write(results)]:
            console.print(f"written: {path}")
        wrong += [
            f"{score.contender} in {case.title}: {score.peak} bytes at its peak, it was planned to keep to {score.cap}"
            for score in result.scores
            if score.over
        ]
        wrong += [
            f"{score.contender} in {case.title}: gradients differ from one process's by {score.difference:.2g} of "
            "their largest value"
            for score in result.wrong
        ]
    return wrong


def run(
    case: Case, contenders: Sequence[Contender], console: Console, costs: Sequence[LayerCost] | None = None
) -> Result:
    """Runs one case with these contenders; the layers' costs are measured first where they are not given."""
    from launch.contest import truth
    from launch.spawn import run_processes

    work = case.work
    begin = time.monotonic()
    console.print(f"{case.title}: measuring layers and the gradients of one process")
    FOLDER.mkdir(parents=True, exist_ok=True)
    log = FOLDER.resolve() / "bench.log"
    costs = _costs(work, log) if costs is None else costs
    (plans, unplanned), able, rows = planned(work, costs, contenders), [], {}
    for contender in contenders:
        if contender.works and work.name not in contender.works:
            continue
        reason = unplanned.get(contender.name) or contender.refuse(work)
        if reason is None:
            able.append(contender)
        rows[contender.name] = refused(contender, reason or "")
    walked = {name: (plan.cells, plan.recipe) for name, plan in plans.items()}
    seconds = [cost.forward_s + cost.backward_s for cost in costs]
    cells = {
        count: tuple(partition(seconds, count))
        for count in {contender.parts * work.stages for contender in able} | {work.stages}
    }
    with tempfile.TemporaryDirectory() as folder:
        truth_file, progress = Path(folder) / "truth.safetensors", Path(folder) / "progress"
        run_processes(truth, 1, work, truth_file, cores())
        given = Given(case, cells, walked, truth_file, progress, log)
        if case.apart:
            seen = _apart(given, able, console)
        else:
            with _followed(progress, case.title, console):
                seen = _together(given, able)
    keys = _keys(work)
    for contender, workers in zip(able, zip(*seen, strict=True), strict=True):
        again = plans[contender.name].rebuilds[0] > 0 if contender.name in plans else contender.rebuilds
        bound = limit(costs, cells[work.stages], work.micro_batches, again)
        found = score(contender, workers, keys, bound)
        rows[contender.name] = _with_plan(found, plans, contender) if contender.ours else found
    console.print(f"{case.title}: {time.monotonic() - begin:.0f} s in all")
    return Result(case, cells[work.stages], tuple(costs), tuple(rows.values()))


@dataclass(frozen=True)
class Given:
    """What all contenders of a case are given."""

    case: Case
    cells: dict[int, tuple[int, ...]]
    plans: dict[str, tuple[tuple[int, ...], Recipe]]
    truth: Path
    progress: Path
    log: Path

    def compete(self, contenders: Sequence[Contender], rounds: int, progress: Path | None) -> list[list[Seen]]:
        """Returns what each worker saw of each contender, in processes of their own."""
        from launch.contest import compete
        from launch.spawn import run_processes

        work = self.case.work
        return run_processes(
            compete, work.stages * work.replicas, self.case, rounds, self.cells, self.plans, contenders, self.truth,
            progress, self.log, deadline_s=DEADLINE_S,
        )  # fmt: skip


def _together(given: Given, contenders: Sequence[Contender]) -> list[list[Seen]]:
    """Returns by worker what was seen of each, all of them in the same processes."""
    return given.compete(contenders, given.case.rounds, given.progress)


def _apart(given: Given, contenders: Sequence[Contender], console: Console) -> list[list[Seen]]:
    """Returns by worker what was seen of each, every turn in fresh processes."""
    case = given.case
    found: dict[str, list[Seen]] = {}
    for at in range(case.rounds):
        begin = time.monotonic()
        for which in order(len(contenders), at, case.rounds):
            contender = contenders[which]
            seen = [one for (one,) in given.compete([contender], 1, None)]
            before = found.get(contender.name)
            found[contender.name] = [a.then(b) for a, b in zip(before, seen, strict=True)] if before else seen
            taken = max(one.rounds[0][-1] for one in seen)
            console.print(f"{case.title}: {contender.name}: {taken:.3f} s a step")
        console.print(f"{case.title}: round {at + 1} of {case.rounds}: {time.monotonic() - begin:.1f} s")
    return [list(of_worker) for of_worker in zip(*(found[one.name] for one in contenders), strict=True)]


def planned(
    work: Work, costs: Sequence[LayerCost], contenders: Sequence[Contender]
) -> tuple[dict[str, Plan], dict[str, str]]:
    """Returns the plans of the suite's contenders by name, those in the memory of another after that one's; and why
    others have none. What a step allocates is planned: gradients, and all that comes and goes."""
    plans: dict[str, Plan] = {}
    without: dict[str, str] = {}
    for contender in sorted(contenders, key=lambda one: one.memory_of is not None):
        if contender.settings is None:
            continue
        pipeline = work.pipeline.model_copy(update=dict(contender.settings))
        if contender.memory_of in without:
            without[contender.name] = f"{contender.memory_of} has no plan"
            continue
        room = peak_of(plans[contender.memory_of]) if contender.memory_of else 1 << 60
        try:
            plans[contender.name] = make_plan(costs, len(costs), pipeline, GRADIENT, Machine(limit=room))
        except PlanError as fault:
            without[contender.name] = "; ".join(fault.faults)
    return plans, without


GRADIENT = 4.0
"""Bytes a parameter that a step allocates."""


def peak_of(plan: Plan) -> int:
    """Returns what a plan's fullest stage needs."""
    return max(stage.peak_bytes for stage in plan.stages)


def _with_plan(found: Score, plans: dict[str, Plan], contender: Contender) -> Score:
    """Returns the score with what the plan said."""
    plan = plans[contender.name]
    again, whole = plan.rebuilds
    cap = peak_of(plans[contender.memory_of]) - SUNDRIES if contender.memory_of else None
    remark = f"{plan.recipe.schedule}, {again} of {whole} forwards rebuilt, {plan.step_s:.3f} s simulated"
    if cap is not None:
        remark += f", at most {cap / 2**20:.1f} MiB"
    # a schedule that rebuilds all it can still keeps one micro-batch a stage
    partly = 0 < again < whole - plan.pipeline.stages
    return replace(
        found, cap=cap, simulated_s=plan.step_s, rebuilds=None if partly else again > 0,
        limit_s=math.nan if partly else found.limit_s, remark=found.remark or remark,
    )  # fmt: skip


def score(contender: Contender, workers: Sequence[Any], keys: set[tuple[int, str]], limit_s: float) -> Score:
    """Puts together what the workers saw of one contender. A gradient that nobody has is as wrong as can be."""
    differences = [value for one in workers for value in one.differences.values()]
    whole = {key for one in workers for key in one.differences} == keys
    worst = max((math.inf if math.isnan(value) else value for value in differences), default=math.inf)
    peaks = [one.peak for one in workers if one.peak is not None]
    return Score(
        contender.name, contender.ours, contender.rebuilds,
        rounds=tuple(
            tuple(max(steps) for steps in zip(*workers_of_round, strict=True))
            for workers_of_round in zip(*(one.rounds for one in workers), strict=True)
        ),
        peak=max(peaks, default=None), difference=worst if whole else math.inf, limit_s=limit_s,
    )  # fmt: skip


def machine() -> dict[str, Any]:
    """Returns what the times depend on beside the code."""
    return {
        "cpu": _cpu(), "cores": cores(), "threads_a_process": 1, "system": platform.platform(),
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "deepspeed", "torchgpipe")},
    }  # fmt: skip


def _costs(work: Work, log: Path) -> Sequence[LayerCost]:
    """Returns the layers' costs, the slowest process's: as many measure at once as will compute at once."""
    from launch.measure import Measured, measure_layers
    from launch.spawn import run_processes

    found: list[Measured] = run_processes(measure_layers, work.alone, work, 1, False, log)
    return max((one.costs for one in found), key=lambda costs: sum(c.forward_s + c.backward_s for c in costs))


def _keys(work: Work) -> set[tuple[int, str]]:
    layers, _ = work.build()
    return {(index, name) for index, layer in enumerate(layers) for name, _ in layer.named_parameters()}


def _write(results: Sequence[Result]) -> Path:
    path = FOLDER / "bench.json"
    record = {"machine": machine(), "cases": [result.record() for result in results]}
    path.write_text(json.dumps(record, indent=1))
    return path


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


@contextmanager
def _followed(progress: Path, title: str, console: Console) -> Iterator[None]:
    """Prints what the workers say, as they say it."""
    tail = Tail(progress)

    def look() -> None:
        for line in tail.lines():
            console.print(f"{title}: {line}")

    watching = Recurring(look, 0.5, "progress", log_error)
    watching.start()
    try:
        yield
    finally:
        if watching.end():
            look()
