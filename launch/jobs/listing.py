"""``make jobs`` and ``make stop``: lists this suite's jobs on a cluster, and stops one."""

from __future__ import annotations

import time
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path

from rich.console import Console
from rich.table import Table

from experiments.base.hints import command
from launch.interrupts import JOB_STOP_S
from launch.jobs.client import METADATA_KEY, JobClient, JobError
from launch.jobs.remote_script import wait_for_end
from launch.runs.store import FOLDER_LINE
from launch.tracking.progress import read_update


def jobs(address: str, console: Console) -> None:
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
        begin_s = (job.start_time or 0) / 1000
        since = f"{datetime.fromtimestamp(begin_s):%Y-%m-%d %H:%M:%S}"
        duration = str(timedelta(seconds=round(((job.end_time or 0) / 1000 or time.time()) - begin_s)))
        what, where = metadata[METADATA_KEY], metadata.get("storage", "")
        rows.add_row(job.submission_id, what, run_and_step(log), job.status.value.lower(), since, duration, where)
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


def stop(address: str, job: str, console: Console) -> None:
    """Stops a job and prints where its results are. Raises JobError for an unknown job and one that does not stop."""
    client = JobClient(address)
    details = client.find(job)
    if details.status.is_terminal():
        console.print(f"job {job} has already ended: {details.status.value.lower()}")
        return
    client.stop_job(job)
    console.print(f"stopping job {job}; it has {JOB_STOP_S} s to end its workers and to copy its runs")
    deadline_s = JOB_STOP_S + 15
    status = wait_for_end(client, job, deadline_s)
    if not status.is_terminal():
        raise JobError(
            f"job {job} has not stopped in {deadline_s:.0f} s (it is {status.value.lower()}); see its log: "
            + command("logs", JOB=job, ADDRESS=client.address)
        )
    console.print(f"job {job} is {status.value.lower()}")
    for line in client.get_job_logs(job).splitlines():
        if line.startswith("interrupted; "):
            console.print(line)
