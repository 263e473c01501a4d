"""Follows a job's log with the progress bar of a local run; reconnects after a lost connection."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress

import aiohttp
from ray.job_submission import JobDetails, JobStatus
from rich.console import Console

from experiments.base.hints import command
from launch import interrupts
from launch.jobs.client import JobClient, JobError, UnreachableError
from launch.tracking.progress import Bar, read_update

LOST_S = 120.0
"""Seconds to retry a cluster that no longer answers."""

SILENCE_S = 15.0
"""Seconds without output after which the cluster is polled."""

RAY_LINES = ("Running entrypoint for job ", "Runtime env is setting up.")
"""Parts of the lines that Ray prints before a job's own."""


def logs(address: str, job: str, console: Console) -> int:
    """Follows a job to its end and returns its exit code. Raises JobError for an unknown one."""
    client = JobClient(address)
    client.find(job)
    return follow_job(client, job, console)


def follow_job(client: JobClient, job: str, console: Console, lost_s: float = LOST_S) -> int:
    """Shows a job's log until it ends. Returns 0 on success, otherwise its exit code, or 1 if it has none.

    Raises UnreachableError when the cluster does not answer for longer than ``lost_s``. The job does not depend on its
    followers.
    """
    with interrupts.interrupt_message(lambda: f"job {job} keeps running\n{how_to(client, job)}"):
        asyncio.run(_follow(client, job, console, lost_s))
    return report_end(client.get_job_info(job), console)


def how_to(client: JobClient, job: str) -> str:
    """Returns the commands for a running job."""
    verbs = {"follow it": "logs", "stop it": "stop", "fetch its results": "fetch"}
    return "\n".join(f"{what}: {command(verb, JOB=job, ADDRESS=client.address)}" for what, verb in verbs.items())


def report_end(details: JobDetails, console: Console) -> int:
    """Prints how a job ended and returns its exit code. The root cause is the last line of its log, unless Ray could
    not start it; then this raises JobError."""
    job, code = details.submission_id, details.driver_exit_code
    if details.status in (JobStatus.SUCCEEDED, JobStatus.STOPPED):
        console.print(f"job {job} {'is done' if details.status == JobStatus.SUCCEEDED else 'was stopped'}")
        return int(details.status == JobStatus.STOPPED)
    if code is None and details.driver_node_id:  # Ray records it when the job starts
        raise JobError(
            f"job {job} ended without an exit code: Ray's supervisor of the job was lost, alone or with its node "
            f"({_cause(details)}); see its log above, and resume its run"
        )
    if code is None:
        raise JobError(f"job {job} could not be started: {_cause(details)}")
    console.print(f"job {job} failed with exit code {code}")
    return code if code in (1, 2) else 1


def _cause(job: JobDetails) -> str:
    """Returns the last error line of Ray's message, or its last line; for a failed installation that is pip's error."""
    lines = [line.strip() for line in (job.message or "").splitlines() if line.strip()] or ["Ray gives no reason"]
    faults = [line for line in lines if line.lower().startswith("error")]
    return (faults or lines)[-1]


async def _follow(client: JobClient, job: str, console: Console, lost_s: float) -> None:
    """Shows the complete lines of a log, each once: a new connection starts over and skips what was shown."""
    seen, rest, lost_at, bar = 0, "", None, Bar(console)

    def show(line: str) -> None:
        if (update := read_update(line)) is not None:
            bar.show(update)
        elif not any(part in line for part in RAY_LINES):
            console.print(line)

    bar.start()
    try:
        while True:
            skip = seen
            with suppress(UnreachableError, aiohttp.ClientError, RuntimeError, OSError):
                async for text in _chunks(client, job):
                    if lost_at is not None:
                        console.print("connected again")
                        lost_at = None
                    new, skip = text[skip:], max(0, skip - len(text))
                    seen += len(new)
                    *lines, rest = (rest + new).split("\n")
                    for line in lines:
                        show(line)
                if client.get_job_status(job).is_terminal():
                    if rest:
                        show(rest)
                    return
            if lost_at is None:
                lost_at = time.monotonic()
                console.print(
                    f"lost the connection to {client.address}; job {job} keeps running; reconnecting for {lost_s:.0f} s"
                )
            if time.monotonic() > lost_at + lost_s:
                raise UnreachableError(
                    f"the cluster at {client.address} has not answered for {lost_s:.0f} s; when it does, follow job "
                    f"{job} again: {command('logs', JOB=job, ADDRESS=client.address)}"
                )
            await asyncio.sleep(1)
    finally:
        bar.stop()


async def _chunks(client: JobClient, job: str) -> AsyncIterator[str]:
    """Yields the pieces of a log. Raises UnreachableError when the cluster stops answering: a machine without power
    or network closes no connection."""
    pieces = aiter(client.tail_job_logs(job))
    waiting = asyncio.ensure_future(anext(pieces, None))
    try:
        while True:
            if not (await asyncio.wait({waiting}, timeout=SILENCE_S))[0]:
                await asyncio.to_thread(client.get_job_status, job)
            elif (piece := waiting.result()) is not None:
                yield piece
                waiting = asyncio.ensure_future(anext(pieces, None))
            else:
                return
    finally:
        waiting.cancel()
        await asyncio.wait({waiting}, timeout=2)
