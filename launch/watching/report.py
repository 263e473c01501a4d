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
from launch.watching.run_state import unexpected_content
from suite.errors import RunFileError, SuiteError


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
        return
    except SuiteError:  # no step was finished: the error that ended the run says more
        return
    except Exception as error:
        console.print(f"the run's page could not be written ({error}); the traceback is in {log_error(error)}")
        return
    console.print(f"report: {run.report}")
