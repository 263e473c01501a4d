"""``make sync``: uploads runs that wandb recorded offline, with ``wandb sync``.

A run is uploaded in parts, the oldest first; wandb adds them to one run. wandb marks each uploaded part, so that it is
not uploaded again.
"""

from __future__ import annotations

import os
import sys
import urllib.error
import urllib.request
from pathlib import Path

from pydantic import ValidationError
from rich.console import Console

from launch.runs.store import RUNS, RunFolder, find_run, known_runs, run_lock
from launch.tracking.wandb_finish import run_logged
from suite.errors import SettingError, TrackingError
from suite.training.wandb_run import has_key

REACH_S, UPLOAD_S = 10.0, 600.0
"""Timeouts in seconds for the server's answer, and for the upload of one part."""

TORN = ("the file ends with an incomplete record", "error getting next record: EOF", "bad header: EOF")
"""wandb's messages for a part that ends with an incomplete record, because its writer was killed."""

CUT = ("network error", "dial tcp", "connection re", "broken pipe", "no such host", "timed out", "timeout")
"""wandb's messages, in lower case, for an unreachable server: the part may not be uploaded completely."""


def sync(name: str, console: Console) -> None:
    """Uploads the offline parts of a run, or of all runs. Raises SettingError for an unknown run, TrackingError when
    there is no key, the server does not answer, or an upload fails."""
    folders = sorted(RUNS / each for each in known_runs())
    runs = [find_run(name)] if name else [RunFolder(folder.resolve()) for folder in folders]
    waiting = [(run, parts) for run in runs if (parts := unsynced_parts(run))]
    if not waiting:
        console.print(f"nothing to upload for {f'run {name}' if name else f'any run in {RUNS}'}")
        return
    server = _server()
    if not has_key(server):
        raise TrackingError(
            f"there is no key for {server}; {len(waiting)} runs are waiting to be uploaded; set WANDB_API_KEY, or run "
            f"`wandb login --host={server}`, and sync again"
        )
    _reach(server)
    failures = []
    for number, (run, parts) in enumerate(waiting, 1):
        name = os.path.relpath(run.path, RUNS.resolve())
        console.print(f"{number} of {len(waiting)}: {name}, {len(parts)} part{'s' * (len(parts) > 1)}")
        try:
            with run_lock(run.path):
                outcome, failure = _upload(run, parts)
        except SettingError:
            console.print("  it is being trained or scored: skipped")
            continue
        console.print(f"  {outcome}")
        if failure:
            failures.append(f"{name}: {failure}")
            _reach(server)
    if failures:
        raise TrackingError(f"{len(failures)} of {len(waiting)} runs were not uploaded; {'; '.join(failures)}")


def unsynced_parts(run: RunFolder) -> list[Path]:
    """Returns the files of a run's parts that were recorded offline and not uploaded, the oldest first."""
    return [part for part in sorted(run.path.glob("wandb/offline-run-*/*.wandb")) if not _is_synced(part)]


def _is_synced(part: Path) -> bool:
    """Whether a part is uploaded, and has not grown since, like the copy of a run that still trains. A mark that wandb
    wrote itself has no size."""
    mark = _mark(part)
    if not mark.exists():
        return False
    try:
        size = int(mark.read_text())
    except ValueError:
        return True
    return size >= part.stat().st_size


def _server() -> str:
    import wandb

    try:
        return str(wandb.setup().settings.base_url)
    except ValidationError as error:
        problems = "; ".join(
            f"WANDB_{'_'.join(map(str, problem['loc'])).upper()}: {problem['msg']}" for problem in error.errors()
        )
        raise TrackingError(f"wandb rejects its settings; {problems}") from None


def _reach(server: str) -> None:
    """Raises TrackingError when a server does not answer at all."""
    try:
        urllib.request.urlopen(server, timeout=REACH_S).close()
    except urllib.error.HTTPError:
        return
    except OSError as error:
        raise TrackingError(
            f"{server} did not answer within {REACH_S:.0f} s ({error}); no data is lost, sync again later"
        ) from error


def _upload(run: RunFolder, parts: list[Path]) -> tuple[str, str | None]:
    """Uploads parts of a run one by one, because wandb stops after an incomplete one. Returns the outcome, and the
    error if there was one."""
    incomplete = 0
    for part in parts:
        log_size = run.wandb_log.stat().st_size if run.wandb_log.exists() else 0
        size, mark = part.stat().st_size, _mark(part)
        mark.unlink(missing_ok=True)
        command = [sys.executable, "-m", "wandb", "sync", str(part.parent)]
        code = run_logged(command, run, UPLOAD_S, WANDB_SILENT="false")
        if mark.exists():
            mark.write_text(str(size))
            continue
        output = run.wandb_log.read_bytes()[log_size:].decode(errors="replace").splitlines()
        is_torn = any(message in line for line in output for message in TORN)
        if code is None or not is_torn or any(message in line.lower() for line in output for message in CUT):
            errors = [line for line in output if line.startswith(("Error: ", "wandb: ERROR "))]
            reason = (errors or output or ["wandb printed nothing"])[-1]
            if code is None:
                reason = "the upload took too long"
            return "failed", f"{reason}; its log is {run.wandb_log}"
        mark.write_text(str(size))  # a second upload would duplicate its steps
        incomplete += 1
    note = f"; {incomplete} incomplete, because its writer was killed" if incomplete else ""
    return f"uploaded{note}", None


def _mark(part: Path) -> Path:
    return part.with_suffix(".wandb.synced")
