"""``make report RUN=...``: the page of a run, or of several runs compared."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from experiments.base.overrides import split
from launch.error_log import log_error
from launch.runs.store import RunFolder, find_run
from launch.watching.comparison import comparison, path_of
from launch.watching.run_data import read_run
from launch.watching.run_page import write_page
from suite.errors import SuiteError


def report_runs(requested: Sequence[str], console: Console) -> None:
    """Writes the page of one run into its folder, or that of several compared, and prints where it is.

    Each text may name several runs with blanks between. Raises SettingError for an unknown run, one without a finished
    step, and for runs of different tasks.
    """
    folders = list(dict.fromkeys(find_run(name) for text in requested for name in split(text)))
    if len(folders) == 1:
        write_page(folders[0])
        console.print(f"report: {folders[0].report}")
        return
    runs = [read_run(folder) for folder in folders]
    page, path = comparison(runs), path_of(runs)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page.html(), encoding="utf-8")
    console.print(f"report: {path}")


def update_page(run: RunFolder, console: Console, holds_lock: bool = False) -> None:
    """Writes the page of a run that has just ended or was scored. A failure is only printed: no result depends on the
    page. ``holds_lock`` is whether the caller holds the run's lock."""
    try:
        write_page(run, holds_lock)
    except SuiteError:  # no step was finished: the error that ended the run says more
        return
    except Exception as error:
        console.print(f"the run's page could not be written ({error}); the traceback is in {log_error(error)}")
        return
    console.print(f"report: {run.report}")
