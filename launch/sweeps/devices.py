"""The devices that members of a sweep share, and the processes on them: this machine's, or those of a Ray cluster."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from typing import Protocol

from launch.sweeps.tasks import Task

END_S = 2.0
"""Seconds for members to end after SIGINT. The sweep itself has little more (``launch/interrupts.py``)."""

_LIBC = ctypes.CDLL(None)


class Work(Protocol):
    """A task that was started."""

    def poll(self) -> int | None:
        """Returns the exit code; None while it runs. A negative one is the signal that ended it."""

    def end(self) -> None:
        """Asks it to end, without waiting."""

    def kill(self) -> None:
        """Ends all its processes that are left."""


class MemberProcess:
    """A command in a process with its own session, so that Ctrl-C reaches only the sweep. It is interrupted when the
    sweep ends, even by SIGKILL."""

    def __init__(self, task: Task, launcher: str, variables: dict[str, str]) -> None:
        with task.log.open("a") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "launch.cli", *task.arguments(launcher)],  # -P: not from this folder
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **variables},
                start_new_session=True,
                preexec_fn=lambda: _LIBC.prctl(1, signal.SIGTERM),  # PR_SET_PDEATHSIG
            )

    def poll(self) -> int | None:
        return self._process.poll()

    def end(self) -> None:
        self._process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        with suppress(ProcessLookupError):  # the group keeps its id after its leader's death
            os.killpg(self._process.pid, signal.SIGKILL)


def end_all(works: Iterable[Work]) -> None:
    """Ends tasks and all their processes: by SIGINT, and after END_S by SIGKILL."""
    running = list(works)
    for work in running:
        work.end()
    until = time.monotonic() + END_S
    try:
        while time.monotonic() < until and any(work.poll() is None for work in running):
            time.sleep(0.1)
    finally:
        for work in running:
            work.kill()


class Devices:
    """The devices that members share: this machine's cores or GPUs. Each member on GPUs sees only its own."""

    def __init__(self, total: int, gpus: bool) -> None:
        self.total, self._gpus = total, gpus
        self._numbers: dict[Task, tuple[int, ...]] = {}

    def free(self, running: Collection[Task]) -> int:
        """Returns how many devices are free beside the running tasks."""
        return self.total - sum(task.devices for task in running)

    def start(self, task: Task, running: Collection[Task]) -> Work:
        """Starts a task beside the running ones. Raises OSError."""
        taken = {number for other in running for number in self._numbers[other]}
        self._numbers[task] = tuple(number for number in range(self.total) if number not in taken)[: task.devices]
        visible = {"CUDA_VISIBLE_DEVICES": cuda_visible_devices(self._numbers[task])} if self._gpus else {}
        return MemberProcess(task, "local", visible)


def cuda_visible_devices(numbers: Sequence[int]) -> str:
    """Returns CUDA_VISIBLE_DEVICES for GPUs given by their number in this process."""
    ours = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = ours.split(",") if ours else None
    return ",".join(names[number] if names else str(number) for number in numbers)
