"""Runs a file of this project as a small job, with the cluster's own Python. Nothing is uploaded."""

from __future__ import annotations

import json
import shlex
import time
import uuid
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from ray.job_submission import JobStatus

from launch.jobs.client import JobClient, JobError

SETTLE_S = 1.5
"""Seconds after which Ray no longer polls an ended job. If it is deleted earlier, Ray records it again as failed."""

PYTHON = (
    r"""P=$(sed -n 's|.* \(/.*\)/lib/python3[^/]*/site-packages/ray/_raylet.so$|\1/bin/python|p' /proc/$PPID/maps """
    r"""2>/dev/null | head -n 1); [ -x "$P" ] || P=python3; """
)
"""Shell code that finds the Python of Ray's own workers, which need not be the first in PATH. The shell's parent is one
of these workers, and has loaded Ray's library from the same environment."""


def run_script(client: JobClient, script: ModuleType, request: Any, deadline_s: float) -> str:
    """Runs a module on the cluster's head, with its request as JSON in GPIPE_REQUEST; returns its output.

    Raises JobError when it fails or misses the deadline. The job is deleted afterwards.
    """
    what = script.__name__.rpartition("_")[2]
    id = f"gpipe-{what}-{uuid.uuid4().hex[:12]}"
    client.submit_job(
        entrypoint=f'{PYTHON}exec "$P" -c {shlex.quote(Path(script.__file__ or "").read_text())}',
        submission_id=id,
        runtime_env={"env_vars": {"GPIPE_REQUEST": json.dumps(request)}},
    )
    try:
        status = wait_for_end(client, id, deadline_s)
        if not status.is_terminal():
            raise JobError(
                f"the {what} of the cluster at {client.address} did not finish in {deadline_s:.0f} s (it is "
                f"{status.value.lower()}); check that its nodes are alive and not overloaded, and try again"
            )
        output = client.get_job_logs(id)
        if status is not JobStatus.SUCCEEDED:
            last = (output.strip().splitlines() or ["it printed nothing"])[-1]
            raise JobError(f"the {what} of the cluster at {client.address} failed: {last}")
        return output
    finally:
        with suppress(JobError):  # as far as the cluster allows
            if not client.get_job_status(id).is_terminal():
                client.stop_job(id)
                wait_for_end(client, id, 10)
            time.sleep(SETTLE_S)
            client.delete_job(id)


def wait_for_end(client: JobClient, job: str, deadline_s: float) -> JobStatus:
    """Returns the status of a job at its end, or after ``deadline_s``."""
    until = time.monotonic() + deadline_s
    while not (status := client.get_job_status(job)).is_terminal() and time.monotonic() < until:
        time.sleep(0.3)
    return status
