"""The page of one run: ``report.html`` in its folder, which needs no other file and no network."""

from __future__ import annotations

import statistics
import time
from urllib.parse import quote

from experiments.base.figures import in_figures, in_hours, in_seconds
from experiments.planning.timeline_plot import timeline_figure
from experiments.report.page import Page, Picture, Section
from experiments.report.table import Table, Value, aligned
from launch.runs.checkpoints import checkpoint_location, steps_in_folder
from launch.runs.store import RunFolder
from launch.watching import run_figures
from launch.watching.run_data import RunData, read_run
from launch.watching.run_figures import memory_of, worker_name
from launch.watching.run_state import short_cause
from launch.watching.translation_samples import score_section
from launch.worker.heartbeat import read_heartbeats
from suite.paths import hide_secrets
from suite.pipeline.planning.devices import GIB
from suite.pipeline.schedule.timeline import Timeline
from suite.training.jsonl import read_lines
from suite.training.metrics import LOSS, MFU, SLOW, STEP, STEP_S, units_done, units_per_s, worker_of
from suite.training.pace import LOOK_EVERY_STEPS
from suite.training.trace import StepTrace, read_traces

MOST_LANGUAGES = 12
"""Languages of a table; of more it shows the lowest and the highest, and the others on a click."""

WARM_UP_STEPS = 2
"""Steps that allocate memory; medians of a longer run leave them out."""


def write_page(run: RunFolder, holds_lock: bool = False) -> None:
    """Writes the page of a run. ``holds_lock`` is whether the caller holds the run's lock.

    Raises SettingError for a run without a finished step.
    """
    run.report.write_text(run_page(read_run(run, holds_lock)).html(), encoding="utf-8")


def run_page(run: RunData) -> Page:
    traces = read_traces(run.run.trace_folder)
    by_length = sorted((trace for trace in traces if trace.replica == 0), key=lambda trace: trace.timeline.seconds)
    traced = by_length[len(by_length) // 2] if by_length else None
    sections = [
        _loss_section(run),
        Section("Plan and measurement", tables=[_plan_table(run, traced), *_stage_table(run, traced)]),
        Section("Timeline of a step", pictures=_timeline(run, traced)),
        Section("Schedules of the plan", pictures=run_figures.schedule_pictures(run)),
        Section("Throughput and memory", pictures=run_figures.speed_and_memory_pictures(run)),
        Section("Optimizer", pictures=run_figures.optimizer_pictures(run)),
        score_section(run),
        _attempt_section(run),
        _request(run),
        Section("Files", links=_links(run)),
    ]
    return Page(f"Run {run.name}", sections, facts=_facts(run))


def median_of(run: RunData, metric: str) -> float | None:
    """Returns the median of a metric over the steps of the current plan, without those that warm up; None if no step
    has it."""
    values = [line[metric] for line in run.steps_as_planned() if isinstance(line.get(metric), int | float)]
    return statistics.median(values[WARM_UP_STEPS:] or values) if values else None


def _facts(run: RunData) -> list[tuple[str, str]]:
    pipeline, last, unit = run.experiment.pipeline, run.history.steps[-1], run.experiment.unit
    loss, speed, mfu = run.points(LOSS), median_of(run, units_per_s(unit)), median_of(run, MFU)
    valid = {name: points[-1][1] for name in run.metrics if (points := run.valid_points(name))}
    began = run.attempts[0]["began"] if run.attempts else None
    facts = {
        "state": run.state.name,
        "step": f"{last['step']:,} of {run.experiment.train.steps:,}",
        "loss": f"{loss[-1][1]:.4f}" if loss else "not finite",
        **{f"validation {name}": f"{value:.4f}" for name, value in valid.items()},
        f"best validation {run.experiment.criterion.name}": run.best and f"{run.best[1]:.4f} at step {run.best[0]:,}",
        f"{unit}/s (median)": speed and in_figures(speed),
        "MFU": mfu and f"{mfu:.1%}",
        unit: f"{int(last.get(units_done(unit), 0)):,}",
        "K x R, M": f"{pipeline.stages} x {pipeline.replicas}, {pipeline.micro_batches}",
        "scale": run.scale,
        "data": run.experiment.data,
        "slower than its peers": ", ".join(slow_workers(run)),
        "started": began and time.strftime("%Y-%m-%d %H:%M", time.localtime(began)),
    }
    return [(name, str(value)) for name, value in facts.items() if value]


def slow_workers(run: RunData) -> list[str]:
    """Returns which workers were slow at the last look (``suite.training.pace``), and how slow."""
    attempt = run.attempts[-1]["attempt"] if run.attempts else 0
    hosts = {(each.replica, each.stage): each.host for each in read_heartbeats(run.run.heartbeats, attempt)}
    found: dict[tuple[int, int], float] = {}
    for line in run.history.steps[-LOOK_EVERY_STEPS:]:
        for name, ratio in line.items():
            if (worker := worker_of(name, SLOW)) is not None:
                found[worker] = ratio
    return [
        f"{worker_name(f'{replica}-{stage}', run)} on {hosts.get((replica, stage), '?')} ({ratio:.2f} times)"
        for (replica, stage), ratio in found.items()
    ]


def _plan_table(run: RunData, traced: StepTrace | None) -> Table:
    """Returns the numbers of the plan beside those of the run."""
    plan, unit = run.plan, run.experiment.unit
    peaks = {cell["stage"]: cell["peak_bytes"] for cell in plan.get("stages", [])}  # those of its whole stage
    bubble = 100 * plan["bubble"] if "bubble" in plan else None
    figures = {
        "step, s": (plan.get("step_s"), median_of(run, STEP_S)),
        f"{unit}/s": (plan.get(f"{unit}_per_second"), median_of(run, units_per_s(unit))),
        "bubble, %": (bubble, None if traced is None else 100 * traced.timeline.bubble),
        "memory of all workers, GiB": (
            _gib(run.experiment.pipeline.replicas * sum(peaks.values())), _gib(run.record.get("peak_memory_bytes"))
        ),
    }  # fmt: skip
    rows: list[list[Value]] = [
        [name, planned, measured, measured / planned if measured is not None and planned else None]
        for name, (planned, measured) in figures.items()
    ]
    source = "measured" if plan.get("measured") else "estimated"
    notes = [f"Planned: simulated from {source} layer costs. Measured: medians of its steps after the first two."]
    if traced is not None:
        notes.append(f"The bubble is that of step {traced.step + 1}, the traced step of median length.")
    return Table("plan", "Step", ("", "planned", "measured", "measured / planned"), rows, notes)


def _stage_table(run: RunData, traced: StepTrace | None) -> list[Table]:
    """Returns the stages of the first replica: planned and measured idle share and memory."""
    rows: list[list[Value]] = []
    since = min((step[STEP] for step in run.steps_as_planned()), default=0)
    for cell in run.plan.get("stages", []):
        stage, idle = cell["stage"], None
        lines = read_lines(run.run.system / f"0-{stage}.jsonl")
        peak = max((memory_of(line) for line in lines if line[STEP] >= since), default=0.0)
        if traced is not None and len(traced.timeline.rows) == run.plan["K"]:
            idle = 100 * traced.timeline.idle(stage)
        name = f"{stage}" + (f", cell {cell['cell']}" if run.plan["virtual_stages"] > 1 else "")
        layers = f"{cell['first_layer']}-{cell['last_layer']}"
        planned = 100 * cell["idle"], idle, _gib(cell["peak_bytes"])
        rows.append([name, layers, cell["parameters"], *planned, _gib(peak)])
    if not rows:
        return []
    note = (
        "The measured peak is the highest sample (one every ten seconds) of the worker's memory; on a CPU it is the "
        "resident memory of the process, with Python and the libraries."
    )
    headings = (
        *("stage", "layers", "parameters", "planned idle, %", "measured idle, %"),
        *("planned peak, GiB", "measured peak, GiB"),
    )
    return [Table("stages", "Stages of the first replica", headings, rows, [note])]


def _timeline(run: RunData, traced: StepTrace | None) -> list[Picture]:
    if traced is None:
        return []
    planned = [("simulated", Timeline.from_lists(run.plan["timeline"]))] if "timeline" in run.plan else []
    figure = timeline_figure([("measured", traced.timeline), *planned], f"step {traced.step + 1}")
    return [Picture("timeline", figure, "The traced step of median length, above the plan.")]


def _loss_section(run: RunData) -> Section:
    """Returns the curves, and the metric of each language at the best and at the last validation."""
    title, pictures = "Loss and validation", run_figures.loss_pictures(run)
    early = run.record.get("stopped_early")
    sentences = [f"The run {early}."] if isinstance(early, str) else []
    if not run.languages:
        return Section(title, sentences, pictures=pictures)
    last = run.history.validations[-1]
    best_step = run.best[0] if run.best is not None else last[STEP]
    best = next((line for line in run.history.validations if line[STEP] == best_step), last)
    names = {language: f"valid/{run.metric}/{language}" for language in run.languages}
    headings = ("language", f"best: step {best[STEP]}", f"last: step {last[STEP]}")
    rows: list[list[Value]] = [[language, best.get(name), last.get(name)] for language, name in names.items()]
    rows.sort(key=lambda row: float(row[2] or 0.0))
    caption = f"Validation {run.metric} by language"
    folded: list[tuple[str, str]] = []
    if len(rows) > MOST_LANGUAGES:
        caption = f"Validation {run.metric}: lowest and highest of {len(rows)} languages"
        folded = [(f"all {len(rows)} languages", aligned(headings, rows))]
        rows = [*rows[: MOST_LANGUAGES // 2], *rows[-MOST_LANGUAGES // 2 :]]
    return Section(title, sentences, [Table("languages", caption, headings, rows, [])], pictures, folded)


def _attempt_section(run: RunData) -> Section:
    rows: list[list[Value]] = []
    for attempt in run.attempts:
        began, ended = attempt["began"], attempt.get("ended")
        running = run.state.name == "training" and attempt is run.attempts[-1]
        rows.append([
            attempt["attempt"], attempt.get("outcome") or ("running" if running else "killed with its supervisor"),
            short_cause(attempt), time.strftime("%m-%d %H:%M:%S", time.localtime(began)),
            in_hours(ended - began) if ended else "-", f"{attempt['K']} x {attempt['R']}",
            attempt.get("start"), attempt.get("reached"),
            in_seconds(attempt["recovered_s"]) if "recovered_s" in attempt else "-",
        ])  # fmt: skip
    headings = ("attempt", "outcome", "cause", "began", "took", "K x R", "from step", "to step", "training again after")
    tables = [Table("attempts", "", headings, rows, [])] if rows else []
    messages = [(each["attempt"], str(each["message"])) for each in run.attempts if "message" in each]
    causes = [(f"cause of the end of attempt {number}", message) for number, message in messages]
    if run.wall_s:
        spent: list[list[Value]] = [[part, in_hours(seconds)] for part, seconds in run.wall_s.items()]
        tables.append(Table("wall-time", "Wall time of all attempts", ("part", "took"), spent, []))
    return Section("Attempts", tables=tables, folded=causes)


def _request(run: RunData) -> Section:
    """Returns what was asked for and what the scale changed."""
    shrunk = [text.rpartition(" -> ") for text in run.experiment.shrunk]
    rows: list[list[Value]] = [[*before.partition(" ")[::2], after] for before, _, after in shrunk]
    notes = [
        "The rules of the scale are in at_laptop_scale of the task's experiment, or in scales.py of the sweeps; your "
        "own settings are in the list, too."
    ]
    headings = "setting", "paper", "here"
    tables = [Table("shrunk", "Changed from the paper's run", headings, rows, notes)] if rows else []
    folded = [("all settings (experiment.toml)", hide_secrets(run.experiment.to_toml()))]
    if run.run.plan_text.exists():
        folded.append(("the plan as printed (plan.txt)", run.run.plan_text.read_text()))
    return Section("Settings", tables=tables, folded=folded)


def _links(run: RunData) -> list[tuple[str, str]]:
    """Returns the files of the run that exist, and its checkpoints."""
    folder, best = run.run, run.best and run.best[0]
    location = hide_secrets(checkpoint_location(folder, run.experiment))
    checkpoints = [(f"checkpoints: {location}", location)]
    if location == str(folder.checkpoints):
        marks = [(step, ", the best" if step == best else "") for step in steps_in_folder(folder)]
        checkpoints = [(f"checkpoint of step {step:,}{mark}", f"checkpoints/{step:08}/") for step, mark in marks]
    logs = [
        (f"log of {worker_name(path.stem.removeprefix('stage-'), run)}", f"logs/{path.name}")
        for path in sorted((folder.path / "logs").glob("*.log"))
    ]
    known = (folder.metrics, folder.record, folder.attempts, folder.messages, folder.perfetto)
    files = [(path.name, path.name) for path in known if path.exists() and path.stat().st_size]
    return [(text, quote(address, safe="/:")) for text, address in (*checkpoints, *files, *logs)]


def _gib(count: float | None) -> float | None:
    return count / GIB if count else None
