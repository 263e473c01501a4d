"""``make report RUN=...``: the page of a run."""

from __future__ import annotations

from rich.console import Console

from launch.error_log import log_error
from launch.runs.store import REPORT_LINE, RunFolder, find_run
from launch.watching.run_page import write_page
from launch.watching.run_state import unexpected_content
from suite.errors import RunFileError, SuiteError


def report_run(requested: str, console: Console) -> None:
    """Writes the page of a run into its folder, and prints where it is.

    Raises SettingError for an unknown run and one without a finished step, RunFileError for one with a damaged file.
    """
    run = find_run(requested)
    with unexpected_content(run):
        write_page(run)
    console.print(f"{REPORT_LINE}{run.report}")


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
        console.print(f"{REPORT_LINE}{run.report}")
