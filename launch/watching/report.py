"""``make report RUN=...``: the page of a run, or of several of one task compared: their results, the settings in which
they differ, their curves."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from experiments.base import setting_rows
from experiments.base.overrides import split
from experiments.report.page import Page, Section
from experiments.report.table import Table, Value
from launch.error_log import log_error
from launch.runs.store import RUNS, RunFolder, find_run
from launch.watching.run_data import RunData, read_run
from launch.watching.run_figures import overlays
from launch.watching.run_page import median_of, write_page
from launch.watching.run_state import unexpected_content
from suite.errors import RunFileError, SettingError, SuiteError
from suite.pipeline.planning.devices import GIB
from suite.training.metrics import LOSS, STEP_S, units_done, units_per_s

LONGEST_NAME = 120
"""Characters of a page's file name; more runs than fit are named by a digest."""


def report_runs(requested: Sequence[str], console: Console) -> None:
    """Writes the page of one run into its folder, or that of several compared, and prints where it is.

    Each text may name several runs with blanks between. Raises SettingError for an unknown run, one without a finished
    step, and for runs of different tasks; RunFileError for a run with a damaged file, which a comparison leaves out.
    """
    folders = list(dict.fromkeys(find_run(name) for text in requested for name in split(text)))
    if len(folders) == 1:
        with unexpected_content(folders[0]):
            write_page(folders[0])
        console.print(f"report: {folders[0].report}")
        return
    runs, left_out = [], []
    for folder in folders:
        try:
            with unexpected_content(folder):
                run = read_run(folder)
                comparison([run])  # alone, so that what cannot be shown is known to be its own
            runs.append(run)
        except RunFileError as error:
            left_out.append(f"{folder.name} is left out: {error}")
            console.print(left_out[-1])
    if not runs:
        raise RunFileError("all of these runs have a damaged file, so there is nothing to compare")
    page, path = comparison(runs, left_out), path_of(runs)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page.html(), encoding="utf-8")
    console.print(f"report: {path}")


def update_page(run: RunFolder, console: Console, holds_lock: bool = False) -> None:
    """Writes the page of a run that has just ended or was scored. A failure is only printed: no result depends on the
    page. ``holds_lock`` is whether the caller holds the run's lock."""
    try:
        write_page(run, holds_lock)
    except RunFileError as error:
        console.print(f"the run's page could not be written: {error}")
    except SuiteError:  # no step was finished: the error that ended the run says more
        pass
    except Exception as error:
        console.print(f"the run's page could not be written ({error}); the traceback is in {log_error(error)}")
    else:
        console.print(f"report: {run.report}")


def comparison(runs: Sequence[RunData], left_out: Sequence[str] = ()) -> Page:
    """Returns the page. ``left_out`` are sentences about runs that cannot be read. Raises SettingError for runs of
    different tasks."""
    _check_same_task(runs)
    labels = short_labels([run.name for run in runs])
    differing = _differing(runs, labels)
    sections = [
        Section("Results", left_out, tables=[_results(runs, labels)]),
        Section("Settings that differ", [] if differing else ["All settings of these runs are equal."], differing),
        Section("Curves", pictures=overlays(runs, labels)),
        Section("Pages of the runs", links=[(run.name, f"{run.name}/report.html") for run in runs if _has_page(run)]),
    ]
    return Page(f"{len(runs)} runs compared", sections)


def path_of(runs: Sequence[RunData]) -> Path:
    """Returns where the page goes: always the same file for the same runs."""
    joined = "_".join(sorted(run.name.replace("/", "-") for run in runs))
    if len(joined) > LONGEST_NAME:
        joined = f"{len(runs)}-runs-{hashlib.sha256(joined.encode()).hexdigest()[:10]}"
    return RUNS / f"compare-{joined}.html"


def short_labels(names: Sequence[str]) -> list[str]:
    """Returns the ids, or the whole names if two runs have the same id or differ in their names."""
    ids = [name.rpartition("/")[2] for name in names]
    same_name = len({name.rpartition("/")[0] for name in names}) == 1
    return ids if same_name and len(set(ids)) == len(ids) else list(names)


def _check_same_task(runs: Sequence[RunData]) -> None:
    first, *others = [(run.name, f"{run.experiment.task} ({run.metric}, {run.experiment.unit})") for run in runs]
    for name, task in others:
        if task != first[1]:
            raise SettingError(
                f"run {first[0]} is of {first[1]} and run {name} of {task}, which do not compare; "
                "report runs of one task together"
            )


def _results(runs: Sequence[RunData], labels: Sequence[str]) -> Table:
    first, unit = runs[0], runs[0].experiment.unit
    names = list(dict.fromkeys(name for run in runs for name in run.metrics))
    rows: list[list[Value]] = []
    for run, label in zip(runs, labels, strict=True):
        last = run.history.steps[-1]
        losses, valid = run.points(LOSS), [run.valid_points(name)[-1:] for name in names]
        scores = run.scores.get("macro", {}).get("bleu", {}).get("all")
        best_step, best = run.best or (None, None)
        peak = run.record.get("peak_memory_bytes")
        rows.append([
            label, run.state.name, last["step"], int(last.get(units_done(unit), 0)),
            losses[-1][1] if losses else None, *(last[0][1] if last else None for last in valid), best, best_step,
            median_of(run, STEP_S), median_of(run, units_per_s(unit)), peak / GIB if peak else None, scores,
        ])  # fmt: skip
    headings = [
        "run", "state", "steps", unit, "loss", *(f"validation {name}" for name in names),
        f"best {first.experiment.criterion.name}", "at step", "step, s", f"{unit}/s", "memory, GiB", "BLEU",
    ]  # fmt: skip
    known = [at for at in range(len(headings)) if any(row[at] is not None for row in rows)]
    values = [[row[at] for at in known] for row in rows]
    note = f"step, s and {unit}/s are medians without the first two steps."
    return Table("results", "", [headings[at] for at in known], values, [note])


def _differing(runs: Sequence[RunData], labels: Sequence[str]) -> list[Table]:
    """Returns a table with one row for each setting that is not equal in all runs; none without such a setting."""
    values = [
        {"name": run.experiment.name, "scale": run.experiment.scale} | setting_rows.values(run.experiment)
        for run in runs
    ]
    names = list(dict.fromkeys(name for each in values for name in each))
    rows: list[list[Value]] = [
        [name, *(each.get(name, "-") for each in values)]
        for name in names
        if len({each.get(name) for each in values}) > 1
    ]
    return [Table("settings", "", ("setting", *labels), rows, [])] if rows else []


def _has_page(run: RunData) -> bool:
    return run.run.report.exists() and not Path(run.name).is_absolute()
