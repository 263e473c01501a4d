"""``make sync``: uploads what runs recorded for wandb without a server, by wandb's own program.

A run is uploaded in its parts, the oldest first, and wandb adds them to one run. It marks each part that is through;
that one is not uploaded again.
"""

from __future__ import annotations

import os
import sys
import urllib.error
import urllib.request
from pathlib import Path

from pydantic import ValidationError
from rich.console import Console

from launch.logged import run_logged
from launch.runs import RUNS, RunFolder, find_run, held
from suite.errors import SettingError, TrackingError
from suite.training.wandb_run import has_key

REACH_S, UPLOAD_S = 10.0, 600.0
"""Seconds that the server has for an answer, and for one part."""

TORN = ("the file ends with an incomplete record", "error getting next record: EOF", "bad header: EOF")
"""How wandb says that a part ends in the middle, as one does whose writer was killed."""


CUT = ("network error", "dial tcp", "connection re", "broken pipe", "no such host", "timed out", "timeout")
"""How wandb says that a server could not be reached, in lower case: what it had to send may not be there."""


def sync(asked: str, console: Console) -> None:
    """Uploads the offline parts of a run, or of all runs. Raises SettingError for an unknown run, TrackingError without
    a key, where the server does not answer, and when something could not be uploaded."""
    runs = [find_run(asked)] if asked else _runs()
    waiting = [(run, parts) for run in runs if (parts := unsent(run))]
    there = f"run {asked}" if asked else f"any run below {RUNS}"
    if not waiting:
        console.print(f"nothing of {there} is left to upload")
        return
    server = _server()
    if not has_key(server):
        raise TrackingError(
            f"there is no key for {server}, and {len(waiting)} runs wait to be uploaded; set WANDB_API_KEY, or run "
            f"`wandb login --host={server}`, and sync again"
        )
    _reach(server)
    failures = []
    for number, (run, parts) in enumerate(waiting, 1):
        name = os.path.relpath(run.path, RUNS.resolve())
        console.print(f"{number} of {len(waiting)}: {name}, {len(parts)} part{'s' * (len(parts) > 1)}")
        try:
            with held(run.path):
                outcome, failure = _upload(run, parts)
        except SettingError:
            console.print("  it is being trained or scored: left for later")
            continue
        console.print(f"  {outcome}")
        if failure:
            failures.append(f"{name}: {failure}")
            _reach(server)
    if failures:
        raise TrackingError(f"{len(failures)} of {len(waiting)} runs were not uploaded; {'; '.join(failures)}")


def unsent(run: RunFolder) -> list[Path]:
    """Returns the parts of a run that were recorded offline and not uploaded, the oldest first."""
    files = sorted(run.path.glob("wandb/offline-run-*/*.wandb"))
    return [file.parent for file in files if not _sent(file.parent)]


def _sent(part: Path) -> bool:
    """Whether a part is through, and has not grown since: a copy of a run in training is added to by the next copy. A
    mark of wandb's own says no size."""
    mark = _mark(part)
    if not mark.exists():
        return False
    try:
        size = int(mark.read_text())
    except ValueError:
        return True
    return size >= _file(part).stat().st_size


def _runs() -> list[RunFolder]:
    return [RunFolder(path.parent.resolve()) for path in sorted(RUNS.glob("*/*/experiment.toml"))]


def _server() -> str:
    import wandb

    try:
        return str(wandb.setup().settings.base_url)
    except ValidationError as error:
        told = "; ".join(f"WANDB_{'_'.join(map(str, one['loc'])).upper()}: {one['msg']}" for one in error.errors())
        raise TrackingError(f"wandb refuses its settings; {told}") from None


def _reach(server: str) -> None:
    """Raises TrackingError where a server gives no answer of whatever kind."""
    try:
        urllib.request.urlopen(server, timeout=REACH_S).close()
    except urllib.error.HTTPError:
        return
    except OSError as error:
        raise TrackingError(
            f"{server} gave no answer within {REACH_S:.0f} s ({error}); nothing is lost, sync again when it can be "
            "reached"
        ) from error


def _upload(run: RunFolder, parts: list[Path]) -> tuple[str, str | None]:
    """Uploads parts of a run, each by itself: wandb leaves the others after one that is torn. Returns what came of it,
    and what went wrong."""
    torn = 0
    for part in parts:
        before = run.wandb_log.stat().st_size if run.wandb_log.exists() else 0
        size = _file(part).stat().st_size
        _mark(part).unlink(missing_ok=True)
        code = run_logged([sys.executable, "-m", "wandb", "sync", str(part)], run, UPLOAD_S, WANDB_SILENT="false")
        if _mark(part).exists():
            _mark(part).write_text(str(size))
            continue
        said = run.wandb_log.read_bytes()[before:].decode(errors="replace").splitlines()
        torn_there = any(end in line for line in said for end in TORN)
        if code is None or not torn_there or any(cut in line.lower() for line in said for cut in CUT):
            errors = [line for line in said if line.startswith(("Error: ", "wandb: ERROR "))]
            why = (
                "the server did not take it in time" if code is None else (errors or said or ["wandb said nothing"])[-1]
            )
            return "failed", f"{why}; its log is {run.wandb_log}"
        _mark(part).write_text(str(size))  # sent again, its steps would stand there twice
        torn += 1
    return "uploaded" + (f"; the writer of {torn} was killed, of that what was on the disk" if torn else ""), None


def _file(part: Path) -> Path:
    (file,) = part.glob("*.wandb")
    return file


def _mark(part: Path) -> Path:
    return _file(part).with_suffix(".wandb.synced")
