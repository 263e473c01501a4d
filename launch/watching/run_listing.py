"""``make runs``: a table of the runs here, newest first, and one run in a few lines.

Reads the end of each file of metrics, not the whole, and only the newest runs: there may be thousands.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from experiments.base.figures import in_figures
from experiments.base.hints import command
from experiments.registry import TASKS
from launch.runs.checkpoints import steps_in_folder
from launch.runs.store import RUNS, RunFolder, closest_runs, find_run, known_runs, resume_command, run_at
from launch.watching.run_data import RunData
from launch.watching.run_state import unexpected_content
from suite.errors import RunFileError, SettingError
from suite.paths import read_json
from suite.training.jsonl import last_line
from suite.training.metrics import LOSS, units_per_s

MOST_ROWS = 1000
"""Of the table."""


def print_runs(requested: str, console: Console) -> None:
    """Prints the run ``requested``, by its folder or id, or the table of all runs whose name contains the text.

    Raises SettingError if there is no such run, and if several have the id; RunFileError if a file of the only one has
    content that is not the suite's.
    """
    known = known_runs()
    if requested and (requested in {Path(name).name for name in known} or run_at(requested)):
        run = find_run(requested)
        with unexpected_content(run):
            lines = list(described(RunData(run)))
        for line in lines:
            console.print(line)
        return
    chosen = [name for name in known if requested in name]
    if not chosen and requested:
        raise SettingError(f"no run is called {requested!r}; {closest_runs(requested, known)}" if known else _no_runs())
    if not chosen:
        console.print(_no_runs())
        return
    runs = sorted((RunFolder((RUNS / name).resolve()) for name in chosen), key=last_changed, reverse=True)
    _print_table([_row(run) for run in runs[:MOST_ROWS]], console)
    if len(runs) > MOST_ROWS:
        older = len(runs) - MOST_ROWS
        console.print(
            f"and {older:,} older runs; to see some of them, give a part of their names: {command('runs', NAME='...')}"
        )


def last_changed(run: RunFolder) -> float:
    """Returns when a run last did something, in seconds since 1970."""
    changed = 0.0
    for path in (run.experiment, run.metrics, run.attempts, run.record):
        with suppress(OSError):
            changed = max(changed, path.stat().st_mtime)
    return changed


def described(run: RunData) -> Iterator[str]:
    """Yields a run in a few lines, and the commands that make sense next."""
    state, settings, pipeline = run.state, run.settings, run.settings.get("pipeline", {})
    yield f"{run.name}: {_state_name(run)}" + "".join(f", {why}" for why in (state.cause, run.damage) if why)
    scale = run.scale and f" at scale {run.scale}"
    yield (
        f"  {settings.get('name')}{scale}; K = {pipeline.get('stages')}, M = {pipeline.get('micro_batches')}, "
        f"R = {pipeline.get('replicas')}"
    )
    steps, loss, validation, speed = _figures(run)
    yield f"  step {steps}, loss {loss}, validation {validation}, {speed}"
    if state.attempts:
        began, changed = state.attempts[0]["began"], last_changed(run.run)
        restarts = f", {len(state.attempts)} attempts" if len(state.attempts) > 1 else ""
        yield f"  started {_clock(began)}, last changed {_clock(changed)} ({_ago(changed)}){restarts}"
    if checkpoints := steps_in_folder(run.run):
        yield f"  checkpoints of steps {', '.join(map(str, checkpoints))}"
    yield f"  folder: {run.run.path}"
    if not run.damage:
        yield "  next:"
        yield from (f"    {line}" for line in _commands(run))


def _commands(run: RunData) -> Iterator[str]:
    name, state = run.name, run.state.name
    if state == "training":
        yield f"tail -f {os.path.relpath(run.run.path / 'logs')}/stage-*.log"
    elif state != "finished":
        yield resume_command(run.run)
    if run.last_step:
        yield f"{command('report', RUN=name)} (writes {os.path.relpath(run.run.report)})"
    if state == "failed":
        yield f"less {os.path.relpath(run.run.path / 'logs')}/stage-*.log"
    if state == "finished":
        if run.settings.get("task") == "translation":
            text = run.settings["text"]
            language = (text.get("languages") or text.get("corpus_languages") or ["de"])[0]
            yield command("score", RUN=name)
            yield command("translate", RUN=name, TO=language, TEXT="Save the file")
            yield command("export", RUN=name)
        steps = run.settings.get("train", {}).get("steps", 0)
        early = (read_json(run.run.record) or {}).get("stopped_early")
        yield resume_command(run.run, "train.patience=none" if early else f"train.steps={2 * steps}")


def _state_name(run: RunData) -> str:
    """Returns the name of its state; ``damaged`` with a damaged file, because a resume is then refused."""
    return "damaged" if run.damage else run.state.name


def _figures(run: RunData) -> tuple[str, str, str, str]:
    """Returns the last step of all, its loss, the last validation, and the speed; a dash for what is not known."""
    last, task = run.last_step, TASKS.get(run.settings.get("task", ""))
    steps, loss = f"{last.get('step', 0)}/{run.settings.get('train', {}).get('steps', '?')}", _shown(last.get(LOSS))
    if task is None:
        return steps, loss, "-", "-"
    metric, speed = f"valid/{task.criterion.name}", last.get(units_per_s(task.unit))
    value = (last_line(run.run.metrics, metric) or {}).get(metric)
    validation = "-" if value is None else f"{task.criterion.name} {_shown(value)}"
    return steps, loss, validation, "-" if speed is None else f"{in_figures(speed)} {task.unit}/s"


def _row(folder: RunFolder) -> tuple[list[str], str]:
    """Returns a run's columns, and what is said about it below the table."""
    run, ago = RunData(folder), _ago(last_changed(folder))
    try:
        with unexpected_content(folder):
            columns = [run.name, run.scale or "-", _state_name(run), *_figures(run), ago]
            cause = run.state.cause
    except RunFileError as error:
        return [run.name, "?", "damaged", "-", "-", "-", "-", ago], f"{run.name} is damaged: {error}"
    if run.damage:
        return columns, f"{run.name} is damaged: {run.damage}"
    return columns, f"{run.name} failed: {cause}" if cause else ""


def _print_table(runs: list[tuple[list[str], str]], console: Console) -> None:
    rows = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("run", "scale", "state", "step", "loss", "valid", "speed", "changed"):
        justify: Literal["left", "right"] = "right" if heading in ("step", "loss", "valid", "speed") else "left"
        # the name may fold, so that a narrow terminal shows all columns
        rows.add_column(heading, justify=justify, no_wrap=heading != "run", overflow="fold")
    for columns, _ in runs:
        rows.add_row(*columns)
    console.print(rows)
    for _, note in runs:
        if note:
            console.print(note)


def _no_runs() -> str:
    return f"there are no runs in {RUNS} yet; start one with {command('experiment', NAME='t128_6b')}"


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def _ago(seconds: float) -> str:
    passed = max(0.0, time.time() - seconds)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if passed >= length:
            return f"{passed / length:.0f} {unit} ago"
    return f"{passed:.0f} s ago"
