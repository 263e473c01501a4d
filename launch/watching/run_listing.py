"""``make runs``: a table of the runs here, newest first, and one run in a few lines.

Reads the end of each file of metrics, not the whole, and only the newest runs: there may be thousands.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from experiments.base.experiment import Experiment
from experiments.base.hints import command
from experiments.planning.plan_report import in_figures
from experiments.registry import TASKS, read_settings
from experiments.sweeps.members.base import read_record
from launch.runs.checkpoints import steps_in_folder
from launch.runs.store import RUNS, RunFolder, closest_runs, find_run, known_runs, resume_command
from launch.watching.run_data import run_name
from launch.watching.run_state import RunState, damage, read_state, unexpected_content
from suite.errors import RunFileError, SettingError
from suite.training.jsonl import last_line_with
from suite.training.metrics import LOSS, units_per_s

MOST_ROWS = 1000
"""Of the table."""


@dataclass(frozen=True)
class RunSummary:
    """A run as one row."""

    run: RunFolder
    state: RunState
    settings: dict[str, Any]
    """What ``experiment.toml`` says."""
    last: dict[str, Any]
    """The metrics of the last step; empty before the first."""
    validation: dict[str, Any]
    """The last validation; empty before the first."""
    damage: str
    """Which of its small files is damaged, and why; empty without one."""

    @property
    def state_name(self) -> str:
        """The name of its state; ``damaged`` with a damaged file, because a resume is then refused."""
        return "damaged" if self.damage else self.state.name

    @property
    def task(self) -> type[Experiment]:
        """The task's experiment, which knows its unit and metric."""
        return TASKS.get(self.settings.get("task", ""), Experiment)

    @property
    def loss(self) -> str:
        """The loss of the last step."""
        return _shown(self.last.get(LOSS)) if self.last else "-"

    @property
    def validation_metric(self) -> str:
        """The last validation."""
        if self.settings.get("task") not in TASKS:
            return "-"
        name = self.task.criterion.name
        value = _shown(self.validation.get(f"valid/{name}"))
        return value if value == "-" else f"{name} {value}"

    @property
    def speed(self) -> str:
        """Tokens or images per second of the last step."""
        if self.settings.get("task") not in TASKS:
            return "-"
        value = self.last.get(units_per_s(self.task.unit))
        return "-" if value is None else f"{in_figures(value)} {self.task.unit}/s"

    @property
    def steps(self) -> str:
        """The last step, of all."""
        return f"{self.last.get('step', 0)}/{self.settings.get('train', {}).get('steps', '?')}"

    @property
    def changed(self) -> float:
        """When it last did something, in seconds since 1970."""
        return last_changed(self.run)


def print_runs(requested: str, console: Console) -> None:
    """Prints the run ``requested``, by its folder or id, or the table of all runs whose name contains the text.

    Raises SettingError if there is no such run, and if several have the id; RunFileError if a file of the only one has
    content that is not the suite's.
    """
    known = known_runs()
    exact = requested and (requested in {Path(name).name for name in known} or _is_run(requested))
    if exact:
        run = find_run(requested)
        with unexpected_content(run):
            lines = list(described(summary_of(run)))
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


def summary_of(run: RunFolder) -> RunSummary:
    """Reads a run."""
    try:
        settings = read_settings(run.experiment)
    except RunFileError:  # the rest can still be shown
        settings = {}
    last = last_line_with(run.metrics, LOSS) or {}
    metric = TASKS[settings["task"]].criterion.name if settings.get("task") in TASKS else ""
    validation = last_line_with(run.metrics, f"valid/{metric}") or {}
    return RunSummary(run, read_state(run), settings, last, validation, damage(run))


def described(summary: RunSummary) -> Iterator[str]:
    """Yields a run in a few lines, and the commands that make sense next."""
    run, state, settings = summary.run, summary.state, summary.settings
    pipeline = settings.get("pipeline", {})
    yield f"{run_name(run)}: {summary.state_name}" + "".join(f", {why}" for why in (state.cause, summary.damage) if why)
    scale = "" if "source" in settings else f" at scale {settings.get('scale')}"  # a run of one's own has none
    yield (
        f"  {settings.get('name')}{scale}; K = {pipeline.get('stages')}, M = {pipeline.get('micro_batches')}, "
        f"R = {pipeline.get('replicas')}"
    )
    yield (f"  step {summary.steps}, loss {summary.loss}, validation {summary.validation_metric}, {summary.speed}")
    if state.attempts:
        began = state.attempts[0].fields["began"]
        restarts = f", {len(state.attempts)} attempts" if len(state.attempts) > 1 else ""
        yield f"  started {_clock(began)}, last changed {_clock(summary.changed)} ({_ago(summary.changed)}){restarts}"
    if steps := steps_in_folder(run):
        yield f"  checkpoints of steps {', '.join(map(str, steps))}"
    yield f"  folder: {run.path}"
    if not summary.damage:
        yield "  next:"
    for line in _commands(summary):
        yield f"    {line}"


def _commands(summary: RunSummary) -> Iterator[str]:
    run, name = summary.run, run_name(summary.run)
    if summary.damage:
        return
    if summary.state.name == "training":
        yield command("watch", RUN=name)
    elif summary.state.name != "finished":
        yield resume_command(run)
    if summary.last:
        yield command("report", RUN=name)
    if summary.state.name == "failed":
        yield f"less {os.path.relpath(run.path / 'logs')}/stage-*.log"
    if summary.state.name == "finished":
        if summary.settings.get("task") == "translation":
            text = summary.settings["text"]
            language = (text.get("languages") or text.get("corpus_languages") or ["de"])[0]
            yield command("score", RUN=name)
            yield command("translate", RUN=name, TO=language, TEXT="Save the file")
            yield command("export", RUN=name)
        steps = summary.settings.get("train", {}).get("steps", 0)
        early = (read_record(run.path) or {}).get("stopped_early")
        yield resume_command(run, "train.patience=none" if early else f"train.steps={2 * steps}")


def _row(run: RunFolder) -> tuple[list[str], str]:
    """Returns a run's columns, and what is said about it below the table."""
    name = run_name(run)
    try:
        with unexpected_content(run):
            summary = summary_of(run)
            columns = [
                name, str(summary.settings.get("scale", "?")), summary.state_name, summary.steps,
                summary.loss, summary.validation_metric, summary.speed, _ago(summary.changed),
            ]  # fmt: skip
    except RunFileError as error:
        return [name, "?", "damaged", "-", "-", "-", "-", _ago(last_changed(run))], f"{name} is damaged: {error}"
    if summary.damage:
        return columns, f"{name} is damaged: {summary.damage}"
    return columns, f"{name} failed: {summary.state.cause}" if summary.state.cause else ""


def _print_table(runs: list[tuple[list[str], str]], console: Console) -> None:
    rows = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("run", "scale", "state", "step", "loss", "valid", "speed", "changed"):
        justify: Literal["left", "right"] = "right" if heading in ("step", "loss", "valid", "speed") else "left"
        # the name may fold, so that a narrow terminal shows all columns
        rows.add_column(heading, justify=justify, no_wrap=heading != "run", overflow="fold")
    for columns, _ in runs:
        rows.add_row(*columns)
    # a file or a pipe gets whole names, however long
    if not console.is_terminal:
        console.width = Measurement.get(console, console.options.update(max_width=1000), rows).maximum
    console.print(rows)
    for _, note in runs:
        if note:
            console.print(note)


def _is_run(requested: str) -> bool:
    try:
        return any((path / "experiment.toml").exists() for path in (Path(requested), RUNS / requested))
    except OSError:  # not a valid file name, such as one that is too long
        return False


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
