"""The processes of members that are at work: started, waited for, and ended with the sweep."""

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

from launch.sweeps.member import END_S, Order
from launch.sweeps.retries import Again, MemberError


class Crew:
    """Runs orders, each in a process that leads a session of its own: a Ctrl-C reaches the sweep alone."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._at_work: set[subprocess.Popen[str]] = set()
        self._closed = False

    def run(self, order: Order, log: Path, variables: Mapping[str, str]) -> None:
        """Carries out an order to its end, with ``variables`` in its environment. Raises MemberError."""
        outcome = Path(order.outcome)
        for sign in (outcome, Path(order.at_work)):
            sign.unlink(missing_ok=True)
        process = self._start(order, log, variables)
        try:
            process.wait()
        finally:
            if process.returncode != 0:
                _signal(process, signal.SIGKILL)  # what is left of its workers, where it was killed itself
            with self._lock:
                self._at_work.discard(process)
            if process.stdin is not None:
                with suppress(BrokenPipeError):  # what it did not read is still in the buffer, and closing writes it
                    process.stdin.close()
        _judge(process.returncode, outcome, log)

    def _start(self, order: Order, log: Path, variables: Mapping[str, str]) -> subprocess.Popen[str]:
        with self._lock, log.open("a") as file:
            if self._closed:
                raise MemberError("the sweep is ending", Again.NO)
            process = subprocess.Popen(
                [sys.executable, "-m", "launch.sweeps.member"], stdin=subprocess.PIPE, stdout=file,
                stderr=subprocess.STDOUT, env={**os.environ, "PYTHONUNBUFFERED": "1", **variables},
                start_new_session=True, text=True,
            )  # fmt: skip
            self._at_work.add(process)
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # it ended before it was told; its exit code says so
            process.stdin.write(order.as_line())
            process.stdin.flush()
        return process

    def end(self) -> None:
        """Ends all members, their workers with them: they are asked to, and after END_S made to."""
        with self._lock:
            self._closed = True
            left = list(self._at_work)
        for process in left:
            _signal(process, signal.SIGTERM, whole=False)
        until = time.monotonic() + END_S
        try:
            while time.monotonic() < until and any(process.poll() is None for process in left):
                time.sleep(0.1)
        finally:
            for process in left:
                _signal(process, signal.SIGKILL)


def _signal(process: subprocess.Popen[str], number: signal.Signals, whole: bool = True) -> None:
    """Sends a signal to a member, or to all of its session; the number of a leader that is gone stays its group's."""
    with suppress(ProcessLookupError):
        (os.killpg if whole else os.kill)(process.pid, number)


def _judge(code: int, outcome: Path, log: Path) -> None:
    """Raises MemberError unless a process said that it was done."""
    try:
        said: dict[str, str] = json.loads(outcome.read_text())
    except FileNotFoundError:
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        raise MemberError(f"its process ended {how} and said nothing; its log is {log}", Again.AGAIN) from None
    if said:
        raise MemberError(said["told"], Again(said["again"]))
