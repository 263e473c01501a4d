"""Follows a job's log; reconnects after a lost connection."""

from __future__ import annotations

import asyncio
import shlex
import socket
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import aiohttp
from ray.job_submission import JobDetails, JobStatus
from rich.console import Console

from experiments.base.hints import command
from launch import interrupts
from launch.jobs.client import JobClient, JobError, UnreachableError
from launch.jobs.start import NODE_LINE
from launch.runs.store import FOLDER_LINE, REPORT_LINE

LOST_S, SILENCE_S = 120.0, 15.0
"""Seconds to retry a cluster that no longer answers, and without output after which it is asked whether it is alive."""

RAY_LINES = ("Running entrypoint for job ", "Runtime env is setting up.")
"""Parts of the lines that Ray prints before a job's own."""


class JobLog:
    """Shows a job's log on this machine, and remembers where the job runs and writes."""

    def __init__(self, client: JobClient, job: str, again: dict[str, str], console: Console) -> None:
        """``again`` are the options of ``gpipe submit`` that resume a run of the job, all but the run."""
        self._client, self._job, self._again, self._console = client, job, again, console
        self._node, self._folder, self._page = "", "", ""

    def follow(self, lost_s: float = LOST_S) -> int:
        """Shows the log until the job ends. Returns 0 on success, otherwise its exit code, or 1 if it has none.

        Raises UnreachableError when the cluster does not answer for longer than ``lost_s``; the job keeps running.
        """
        with interrupts.interrupt_message(lambda: f"job {self._job} keeps running\n{self.how_to()}"):
            asyncio.run(self._show_all(lost_s))
        code = report_end(self._client.get_job_info(self._job), self._console)
        if self._page:
            self._console.print(f"its page: {copy_line(self._node, self._page)}", soft_wrap=True)
        return code

    def how_to(self) -> str:
        """Returns the commands for a running job."""
        ray, at = f"{self._client.ray} job", f"--address {self._client.address}"
        lines = [f"follow it: {ray} logs {at} --follow {self._job}", f"stop it: {ray} stop {at} {self._job}"]
        if self._folder:
            run = "/".join(Path(self._folder).parts[-2:])
            lines.append(f"resume its run then: {command('submit', RUN=run, **self._again)}")
        if self._page:
            lines.append(f"its page, at its end: {copy_line(self._node, self._page)}")
        return "\n".join(lines)

    def _show(self, line: str) -> None:
        if line.startswith(NODE_LINE):
            self._node = line.removeprefix(NODE_LINE)
        elif line.startswith(FOLDER_LINE):
            self._folder = line.removeprefix(FOLDER_LINE)
            self._page = f"{self._folder}/report.html"
        elif line.startswith(REPORT_LINE):
            self._page = line.removeprefix(REPORT_LINE).partition(" and ")[0]
        if not any(part in line for part in RAY_LINES):
            self._console.print(line)

    async def _show_all(self, lost_s: float) -> None:
        """Shows the complete lines of a log, each once: a new connection starts over and skips what was shown."""
        seen, rest, lost_at = 0, "", None
        while True:
            skip = seen
            with suppress(UnreachableError, aiohttp.ClientError, RuntimeError, OSError):
                async for text in _chunks(self._client, self._job):
                    if lost_at is not None:
                        self._console.print("connected again")
                        lost_at = None
                    new, skip = text[skip:], max(0, skip - len(text))
                    seen += len(new)
                    *lines, rest = (rest + new).split("\n")
                    for line in lines:
                        self._show(line)
                if self._client.get_job_status(self._job).is_terminal():
                    self._show(rest) if rest else None
                    return
            where = f"{self._client.address}; job {self._job} keeps running"
            if lost_at is None:
                lost_at = time.monotonic()
                self._console.print(f"lost the connection to {where}; reconnecting for {lost_s:.0f} s")
            if time.monotonic() > lost_at + lost_s:
                raise UnreachableError(f"no answer for {lost_s:.0f} s from {where}; when it answers\n{self.how_to()}")
            await asyncio.sleep(1)


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


def report_end(details: JobDetails, console: Console) -> int:
    """Prints how a job ended and returns its exit code. The root cause is the last line of its log, unless Ray could
    not start it or its driver was killed; then this raises JobError."""
    job, code = details.submission_id, details.driver_exit_code
    if details.status in (JobStatus.SUCCEEDED, JobStatus.STOPPED):
        console.print(f"job {job} {'is done' if details.status == JobStatus.SUCCEEDED else 'was stopped'}")
        return int(details.status == JobStatus.STOPPED)
    told = [line.strip() for line in (details.message or "").splitlines() if line.strip()]
    reason = told[-1] if told else "no reason given"
    if code is None or code < 0:
        began = details.driver_node_id  # Ray records it when the job starts
        ended = f"was killed (signal {-code})" if code else f"was lost, alone or with its node ({reason})"
        raise JobError(
            f"job {job} ended early: its process {ended}; see its log above, and resume its run"
            if began
            else f"job {job} could not be started: {reason}"
        )
    console.print(f"job {job} failed with exit code {code}")
    return code if code in (1, 2) else 1


def copy_line(node: str, path: str) -> str:
    """Returns the command that brings a file from the node of a ``NODE_LINE`` into the current folder."""
    host, _, reached_by = node.rstrip(")").partition(" (")
    kind, _, namespace = reached_by.partition(" ")
    if kind == "namespace":
        return f"kubectl cp {namespace}/{host}:{path} {Path(path).name}"
    if host == socket.gethostname() and Path(path).parent.exists():
        return f"cp {shlex.quote(path)} ."
    return f"scp {shlex.quote(f'{reached_by}:{path}')} ."
