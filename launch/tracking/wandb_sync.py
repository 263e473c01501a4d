"""``make sync``: uploads what runs recorded for wandb offline: each part, the oldest first, by ``wandb sync``.

Given a part whose writer was killed, ``wandb sync`` leaves out the parts after it, ends with 0, and sets no mark, so
that the next call adds the same steps again. So each part goes alone, and a torn one gets its mark here.
"""

from __future__ import annotations

import sys
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path

from rich.console import Console

from launch.runs.store import RUNS, RunFolder, find_run, known_runs, run_lock
from launch.tracking.wandb_finish import run_logged
from suite.errors import SettingError, TrackingError, first_line
from suite.training.wandb_run import has_key

REACH_S, UPLOAD_S = 10.0, 600.0
"""Seconds for the server's answer, and for the upload of one part."""

TORN = ("the file ends with an incomplete record", "error getting next record: EOF", "bad header: EOF")
"""wandb's messages for a part that ends with an incomplete record, because its writer was killed."""

CUT = ("network error", "dial tcp", "connection re", "broken pipe", "no such host", "timed out", "timeout")
"""wandb's messages, in lower case, for an unreachable server: the part may not be uploaded completely."""


def sync(name: str, console: Console) -> None:
    """Uploads the offline parts of a run, or of all runs. Raises SettingError for an unknown run, TrackingError when
    there is no key, the server does not answer, or an upload fails."""
    runs = [find_run(name)] if name else [RunFolder((RUNS / each).resolve()) for each in sorted(known_runs())]
    waiting = [(run, parts) for run in runs if (parts := unsynced_parts(run))]
    if not waiting:
        console.print(f"nothing to upload for {f'run {name}' if name else f'any run in {RUNS}'}")
        return
    _check_server(len(waiting))
    failures = []
    for run, parts in waiting:
        try:
            with run_lock(run.path):
                failure = next(filter(None, (_upload(run, part) for part in parts)), "")
        except SettingError:
            console.print(f"{run.name}: it is being trained or scored: skipped")
            continue
        uploaded = f"{len(parts)} part{'s' * (len(parts) > 1)} uploaded"
        console.print(f"{run.name}: {'failed' if failure else uploaded}")
        failures += [f"{run.name}: {failure}"] if failure else []
    if failures:
        raise TrackingError(f"{len(failures)} of {len(waiting)} runs were not uploaded; {'; '.join(failures)}")


def unsynced_parts(run: RunFolder) -> list[Path]:
    """Returns the files of a run's parts that were recorded offline and not uploaded, the oldest first."""
    return [part for part in sorted(run.path.glob("wandb/offline-run-*/*.wandb")) if not _mark(part).exists()]


def _mark(part: Path) -> Path:
    return part.with_suffix(".wandb.synced")


def _check_server(runs: int) -> None:
    """Raises TrackingError without a key, and when the server does not answer at all."""
    import wandb

    try:
        server = str(wandb.setup().settings.base_url)
        if not has_key(server):
            raise TrackingError(
                f"there is no key for {server}; {runs} runs are waiting to be uploaded; set WANDB_API_KEY, or run "
                f"`wandb login --host={server}`, and sync again"
            )
        with suppress(urllib.error.HTTPError):  # an answer
            urllib.request.urlopen(server, timeout=REACH_S).close()
    except (OSError, ValueError) as error:
        raise TrackingError(
            f"wandb's server does not answer in {REACH_S:.0f} s, or WANDB_BASE_URL is no URL ({first_line(error)}); no "
            "data is lost, sync again later"
        ) from None


def _upload(run: RunFolder, part: Path) -> str:
    """Uploads a part; returns why that failed, or nothing."""
    begin = run.wandb_log.stat().st_size if run.wandb_log.exists() else 0
    command = [sys.executable, "-P", "-m", "wandb", "sync", str(part.parent)]
    code = run_logged(command, run, UPLOAD_S, WANDB_SILENT="false")
    if _mark(part).exists():
        return ""
    output = run.wandb_log.read_bytes()[begin:].decode(errors="replace").splitlines()
    is_torn = any(message in line for line in output for message in TORN)
    if code is not None and is_torn and not any(message in line.lower() for line in output for message in CUT):
        _mark(part).touch()  # a second upload would add its steps again
        return ""
    errors = [line for line in output if line.startswith(("Error: ", "wandb: ERROR "))]
    reason = "the upload took too long" if code is None else (errors or output or ["wandb printed nothing"])[-1]
    return f"{reason}; its log is {run.wandb_log}"
