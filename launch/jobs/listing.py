"""``make jobs`` and ``make stop``: which jobs of this suite a cluster has, and how one is ended."""

from __future__ import annotations

import time
from datetime import datetime, timedelta

from ray.job_submission import JobDetails
from rich.console import Console
from rich.table import Table

from launch.interrupts import JOB_STOP_S
from launch.jobs.door import OURS, Door, JobError


def jobs(asked: str, console: Console) -> None:
    """Prints the jobs of this suite, the newest first."""
    door = Door(asked)
    found = door.ours()
    if not found:
        console.print(f"no jobs on the cluster at {door.address} yet")
        return
    rows = Table(title=f"jobs on {door.address}", title_justify="left")
    for heading in ("job", "runs", "status", "since", "duration", "where"):
        rows.add_column(heading, overflow="fold", no_wrap=heading == "job")  # whole: it is copied from here
    for job in found:
        told = job.metadata or {}
        rows.add_row(
            job.submission_id, told[OURS], job.status.value.lower(), _since(job), _duration(job),
            told.get("storage", ""),
        )  # fmt: skip
    console.print(rows)


def stop(asked: str, job: str, console: Console, deadline_s: float = JOB_STOP_S + 15) -> None:
    """Ends a job and says what is left of it. Raises JobError for an unknown one, or one that does not end in time."""
    door = Door(asked)
    details = door.find(job)
    if details.status.is_terminal():
        console.print(f"job {job} has ended already: it is {details.status.value.lower()}")
        return
    door.stop_job(job)
    console.print(f"job {job} was told to end; it has {JOB_STOP_S} s to end its workers and to copy its runs")
    until = time.monotonic() + deadline_s
    while not (status := door.get_job_status(job)).is_terminal():
        if time.monotonic() > until:
            raise JobError(
                f"job {job} has not ended in {deadline_s:.0f} s (it is {status.value.lower()}); see its log by: make "
                f"logs JOB={job} ADDRESS={door.address}"
            )
        time.sleep(0.3)
    console.print(f"job {job} is {status.value.lower()}")
    for line in door.get_job_logs(job).splitlines():
        if line.startswith("interrupted; "):
            console.print(line)


def _since(job: JobDetails) -> str:
    return f"{datetime.fromtimestamp((job.start_time or 0) / 1000):%Y-%m-%d %H:%M:%S}"


def _duration(job: JobDetails) -> str:
    end = (job.end_time or 0) / 1000 or time.time()
    return str(timedelta(seconds=round(end - (job.start_time or 0) / 1000)))
