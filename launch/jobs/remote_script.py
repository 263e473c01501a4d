"""Runs a script of this folder as a small job, with the cluster's own Python. Nothing is uploaded."""

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
"""Seconds after which Ray no longer polls an ended job. If it is deleted earlier, Ray records it again as failed."""

PYTHON = (
    r"""P=$(sed -n 's|.* \(/.*\)/lib/python3[^/]*/site-packages/ray/_raylet.so$|\1/bin/python|p' /proc/$PPID/maps """
    r"""2>/dev/null | head -n 1); [ -x "$P" ] || P=python3; """
)
"""Shell code that finds the Python of Ray's own workers, which need not be the first in PATH. The shell's parent is one
of these workers, and has loaded Ray's library from the same environment."""


def run_script(client: JobClient, script: Path, variable: str, request: Any, deadline_s: float) -> str:
    """Runs a script on the cluster's head, with its request as JSON in an environment variable; returns its output.

    Raises JobError when it fails or misses the deadline. The job is deleted afterwards.
    """
    what = script.stem.removeprefix("remote_")
    id = f"gpipe-{what}-{uuid.uuid4().hex[:12]}"
    client.submit_job(
        entrypoint=f'{PYTHON}exec "$P" -c {shlex.quote(script.read_text())}',
        submission_id=id,
        runtime_env={"env_vars": {variable: json.dumps(request)}},
    )
    until = time.monotonic() + deadline_s
    try:
        while not (status := client.get_job_status(id)).is_terminal():
            if time.monotonic() > until:
                raise JobError(
                    f"the {what} of the cluster at {client.address} did not finish in {deadline_s:.0f} s (it is "
                    f"{status.value.lower()}); check that its nodes are alive and not overloaded, and try again"
                )
            time.sleep(POLL_S)
        output = client.get_job_logs(id)
        if status is not JobStatus.SUCCEEDED:
            last = (output.strip().splitlines() or ["it printed nothing"])[-1]
            raise JobError(f"the {what} of the cluster at {client.address} failed: {last}")
        return output
    finally:
        _clear(client, id)


def _clear(client: JobClient, id: str) -> None:
    """Stops the job if it runs, and deletes it from the cluster's list, as far as the cluster allows."""
    with suppress(JobError):
        if not client.get_job_status(id).is_terminal():
            client.stop_job(id)
            until = time.monotonic() + 10
            while not client.get_job_status(id).is_terminal() and time.monotonic() < until:
                time.sleep(POLL_S)
        time.sleep(SETTLE_S)
        client.delete_job(id)
