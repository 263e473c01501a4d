"""Starts the processes of members, waits for them, and ends them with the sweep."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from launch.sweeps.member import MemberSpec
from launch.sweeps.member_process import END_S
from launch.sweeps.retries import MemberError, RetryDecision


class ProcessPool:
    """Runs each member in a process with its own session, so that Ctrl-C reaches only the sweep."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[str]] = set()
        self._closed = False

    def run(self, spec: MemberSpec, log_file: Path, variables: Mapping[str, str]) -> None:
        """Runs a member to its end, with ``variables`` in its environment. Raises MemberError."""
        outcome_file = Path(spec.outcome_file)
        outcome_file.unlink(missing_ok=True)
        process = self._start(spec, log_file, variables)
        try:
            process.wait()
        finally:
            if process.returncode != 0:
                _signal(process, signal.SIGKILL)  # its workers may have survived it
            with self._lock:
                self._running.discard(process)
            if process.stdin is not None:
                with suppress(BrokenPipeError):  # closing flushes what it did not read
                    process.stdin.close()
        _raise_failure(process.returncode, outcome_file, log_file)

    def _start(self, spec: MemberSpec, log_file: Path, variables: Mapping[str, str]) -> subprocess.Popen[str]:
        with self._lock, log_file.open("a") as file:
            if self._closed:
                raise MemberError("the sweep is stopping", RetryDecision.NO)
            process = subprocess.Popen(
                [sys.executable, "-m", "launch.sweeps.member_process"],
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **variables},
                start_new_session=True,
                text=True,
            )
            self._running.add(process)
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended; its exit code says why
            process.stdin.write(spec.as_line())
            process.stdin.flush()
        return process

    def end(self) -> None:
        """Ends all members and their workers: by SIGTERM, and after END_S by SIGKILL."""
        with self._lock:
            self._closed = True
            running = list(self._running)
        for process in running:
            _signal(process, signal.SIGTERM, whole_session=False)
        until = time.monotonic() + END_S
        try:
            while time.monotonic() < until and any(process.poll() is None for process in running):
                time.sleep(0.1)
        finally:
            for process in running:
                _signal(process, signal.SIGKILL)


def _signal(process: subprocess.Popen[str], number: signal.Signals, whole_session: bool = True) -> None:
    """Sends a signal to a member or its whole process group; the group keeps its id after its leader's death."""
    with suppress(ProcessLookupError):
        (os.killpg if whole_session else os.kill)(process.pid, number)


def _raise_failure(code: int, outcome_file: Path, log_file: Path) -> None:
    """Raises MemberError unless the process reported success."""
    try:
        failure: dict[str, str] = json.loads(outcome_file.read_text())
    except FileNotFoundError:
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        raise MemberError(
            f"its process ended {how} without a report; its log is {log_file}", RetryDecision.AGAIN
        ) from None
    if failure:
        raise MemberError(failure["message"], RetryDecision(failure["retry"]))
