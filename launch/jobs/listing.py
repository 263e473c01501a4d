"""``make jobs`` and ``make stop``: lists this suite's jobs on a cluster, and stops one."""

from __future__ import annotations

import time
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path

from ray.job_submission import JobDetails
from rich.console import Console
from rich.table import Table

from experiments.base.hints import command
from launch.interrupts import JOB_STOP_S
from launch.jobs.client import METADATA_KEY, JobClient, JobError
from launch.runs.store import FOLDER_LINE
from launch.tracking.progress import read_update


def jobs(address: str, console: Console) -> None:
    """Prints this suite's jobs, newest first."""
    client = JobClient(address)
    suite_jobs = client.suite_jobs()
    if not suite_jobs:
        console.print(f"the cluster at {client.address} has no jobs of this suite yet")
        return
    rows = Table(title=f"jobs on {client.address}", title_justify="left")
    for heading in ("job", "runs", "run and step", "status", "since", "duration", "where"):
        rows.add_column(heading, overflow="fold", no_wrap=heading == "job")  # people copy it
    for job in suite_jobs:
        metadata = job.metadata or {}
        log = ""
        if not job.status.is_terminal():
            with suppress(RuntimeError, JobError):  # the node of its driver does not answer
                log = client.get_job_logs(job.submission_id or "")
        rows.add_row(
            job.submission_id, metadata[METADATA_KEY], run_and_step(log), job.status.value.lower(), _since(job),
            _duration(job), metadata.get("storage", ""),
        )  # fmt: skip
    console.print(rows)


def run_and_step(log: str) -> str:
    """Returns the run that a job's log names last, and its step; empty before it has one."""
    run, step = "", ""
    for line in log.splitlines():
        if line.startswith(FOLDER_LINE):
            run, step = "/".join(Path(line.removeprefix(FOLDER_LINE)).parts[-2:]), ""
        elif (update := read_update(line)) is not None:
            step = f" {update.step}/{update.steps}"
    return run + step


def stop(address: str, job: str, console: Console, deadline_s: float = JOB_STOP_S + 15) -> None:
    """Stops a job and prints where its results are. Raises JobError for an unknown job and one that does not stop."""
    client = JobClient(address)
    details = client.find(job)
    if details.status.is_terminal():
        console.print(f"job {job} has already ended: {details.status.value.lower()}")
        return
    client.stop_job(job)
    console.print(f"stopping job {job}; it has {JOB_STOP_S} s to end its workers and to copy its runs")
    until = time.monotonic() + deadline_s
    while not (status := client.get_job_status(job)).is_terminal():
        if time.monotonic() > until:
            raise JobError(
                f"job {job} has not stopped in {deadline_s:.0f} s (it is {status.value.lower()}); see its log: "
                + command("logs", JOB=job, ADDRESS=client.address)
            )
        time.sleep(0.3)
    console.print(f"job {job} is {status.value.lower()}")
    for line in client.get_job_logs(job).splitlines():
        if line.startswith("interrupted; "):
            console.print(line)


def _since(job: JobDetails) -> str:
    return f"{datetime.fromtimestamp((job.start_time or 0) / 1000):%Y-%m-%d %H:%M:%S}"


def _duration(job: JobDetails) -> str:
    end = (job.end_time or 0) / 1000 or time.time()
    return str(timedelta(seconds=round(end - (job.start_time or 0) / 1000)))
