"""Small jobs of our own: a file of this folder, run by the cluster's own Python. Nothing is uploaded."""

from __future__ import annotations

import json
import shlex
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

from ray.job_submission import JobStatus

from launch.jobs.client import JobClient, JobError

POLL_S = 0.3

SETTLE_S = 1.5
"""Seconds after which Ray looks at an ended job no more: one that is deleted before, it writes down again as failed."""

PYTHON = (
    r"""P=$(sed -n 's|.* \(/.*\)/lib/python3[^/]*/site-packages/ray/_raylet.so$|\1/bin/python|p' /proc/$PPID/maps """
    r"""2>/dev/null | head -n 1); [ -x "$P" ] || P=python3; """
)
"""A shell's way to the Python that Ray's own workers run with: of what is first in PATH nothing is known. The shell's
parent is one of those workers, and has Ray's library loaded from beside that Python."""


def run_script(client: JobClient, script: Path, variable: str, asked: Any, deadline_s: float) -> str:
    """Runs a script on the cluster's head, its argument as JSON in an environment variable; returns what it printed.

    Raises JobError where it fails or is not through in time. The job is deleted afterwards.
    """
    what = script.stem
    id = f"gpipe-{what}-{uuid.uuid4().hex[:12]}"
    client.submit_job(
        entrypoint=f'{PYTHON}exec "$P" -c {shlex.quote(script.read_text())}',
        submission_id=id,
        runtime_env={"env_vars": {variable: json.dumps(asked)}},
    )
    until = time.monotonic() + deadline_s
    try:
        while not (status := client.get_job_status(id)).is_terminal():
            if time.monotonic() > until:
                raise JobError(
                    f"the {what} of the cluster at {client.address} was not through in {deadline_s:.0f} s (it is "
                    f"{status.value.lower()}); see that its nodes are alive and not overloaded, and try again"
                )
            time.sleep(POLL_S)
        said = client.get_job_logs(id)
        if status is not JobStatus.SUCCEEDED:
            last = (said.strip().splitlines() or ["it said nothing"])[-1]
            raise JobError(f"the {what} of the cluster at {client.address} failed: {last}")
        return said
    finally:
        _clear(client, id)


def _clear(client: JobClient, id: str) -> None:
    """Ends the job if need be, and takes it off the cluster's list, as far as that goes."""
    with suppress(JobError):
        if not client.get_job_status(id).is_terminal():
            client.stop_job(id)
            until = time.monotonic() + 10
            while not client.get_job_status(id).is_terminal() and time.monotonic() < until:
                time.sleep(POLL_S)
        time.sleep(SETTLE_S)
        client.delete_job(id)
