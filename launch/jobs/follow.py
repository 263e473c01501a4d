"""A job's log as it grows, with the bar of a run on one's own machine; lost connections are taken up again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
from ray.job_submission import JobDetails, JobStatus
from rich.console import Console

from launch import interrupts
from launch.jobs.door import AwayError, Door, JobError
from launch.progress import Bar, read_update

LOST_S = 120.0
"""Seconds for which a cluster that no longer answers is tried again."""

QUIET_S = 15.0
"""Seconds without a word after which the cluster is asked whether it is there."""

OF_RAY = ("Running entrypoint for job ", "Runtime env is setting up.")
"""Parts of the lines that Ray puts before a job's own."""


def logs(asked: str, job: str, console: Console) -> int:
    """Follows a job to its end and returns its exit code. Raises JobError for an unknown one."""
    door = Door(asked)
    door.find(job)
    return follow(door, job, console)


def follow(door: Door, job: str, console: Console, lost_s: float = LOST_S) -> int:
    """Shows a job's log until it ends; returns 0 when it did its work, otherwise its exit code, 1 where it has none.

    Raises AwayError where the cluster is away for longer than ``lost_s``. The job does not depend on who follows it.
    """
    with interrupts.advised(lambda: f"job {job} goes on without you\n{how_to(door, job)}"):
        asyncio.run(_show(door, job, console, lost_s))
    return tell_end(door.get_job_info(job), console)


def how_to(door: Door, job: str) -> str:
    """Returns what a person may do with a job that runs."""
    rest = f"JOB={job} ADDRESS={door.address}"
    return f"follow it: make logs {rest}\nstop it: make stop {rest}\nfetch its results: make fetch {rest}"


def tell_end(details: JobDetails, console: Console) -> int:
    """Says how a job ended and returns its exit code. Its first cause stands above: it is the last that its log says,
    unless Ray could not start it."""
    job, code = details.submission_id, details.driver_exit_code
    if details.status == JobStatus.SUCCEEDED:
        console.print(f"job {job} is done")
        return 0
    if details.status == JobStatus.STOPPED:
        console.print(f"job {job} was stopped")
        return 1
    if code is None and details.driver_node_id:  # Ray notes it as the job begins
        raise JobError(
            f"job {job} ended without an exit code: what Ray has to watch over it was lost, with its node or by itself "
            f"({_cause(details.message or 'Ray gives no reason')}); see its log above, and take its run up again"
        )
    if code is None:
        raise JobError(f"job {job} could not be started: {_cause(details.message or 'Ray gives no reason')}")
    console.print(f"job {job} failed with exit code {code}")
    return code if code in (1, 2) else 1


def _cause(message: str) -> str:
    """Returns the last line of what Ray says, which of an installation is pip's own error."""
    lines = [line.strip() for line in message.strip().splitlines() if line.strip()]
    faults = [line for line in lines if line.lower().startswith("error")]
    return (faults or lines)[-1]


async def _show(door: Door, job: str, console: Console, lost_s: float) -> None:
    bar = Bar(console)
    bar.start()
    try:
        async for line in _lines(door, job, bar, lost_s):
            update = read_update(line)
            if update is not None:
                bar.show(update)
            elif not any(part in line for part in OF_RAY):
                bar.say(line)
    finally:
        bar.stop()


async def _lines(door: Door, job: str, bar: Bar, lost_s: float) -> AsyncIterator[str]:
    """Yields the whole lines of a log, each once: a new connection begins at the beginning, and what was seen is left
    out."""
    seen, rest, lost_at = 0, "", None
    while True:
        skip = seen
        try:
            async for text in _chunks(door, job):
                if lost_at is not None:
                    bar.say("connected again")
                    lost_at = None
                new, skip = text[skip:], max(0, skip - len(text))
                seen += len(new)
                *lines, rest = (rest + new).split("\n")
                for line in lines:
                    yield line
            if door.get_job_status(job).is_terminal():
                if rest:
                    yield rest
                return
        except (AwayError, aiohttp.ClientError, RuntimeError, OSError) as error:
            if isinstance(error, JobError) and not isinstance(error, AwayError):
                raise
        if lost_at is None:
            lost_at = time.monotonic()
            bar.say(f"the connection to {door.address} is lost; job {job} goes on, and so does this for {lost_s:.0f} s")
        if time.monotonic() > lost_at + lost_s:
            raise AwayError(
                f"the cluster at {door.address} has not answered for {lost_s:.0f} s; when it does, take up job {job} "
                f"by: make logs JOB={job} ADDRESS={door.address}"
            )
        await asyncio.sleep(1)


async def _chunks(door: Door, job: str) -> AsyncIterator[str]:
    """Yields the pieces of a log. Raises AwayError when the cluster fell silent: a machine that lost its power, or a
    network, closes no connection."""
    pieces = aiter(door.tail_job_logs(job))
    waiting: asyncio.Future[Any] | None = None
    try:
        while True:
            waiting = waiting or asyncio.ensure_future(anext(pieces))
            done, _ = await asyncio.wait({waiting}, timeout=QUIET_S)
            if not done:
                await asyncio.to_thread(door.get_job_status, job)
                continue
            try:
                yield waiting.result()
            except StopAsyncIteration:
                return
            waiting = None
    finally:
        if waiting is not None and not waiting.done():
            waiting.cancel()
            await asyncio.wait({waiting}, timeout=2)
