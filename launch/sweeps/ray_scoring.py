"""Scoring on one device of a Ray cluster: a task that takes it, so that nobody else is given the same one."""

from __future__ import annotations

import os
import time
from pathlib import Path

from launch.cluster.agents import START_DEADLINE
from launch.jobs import secrets
from launch.sweeps.member import Order, log_console, score
from launch.sweeps.room import connected, devices_of
from suite.errors import BusyError, SuiteError, WorkerError

SCORED_S = 7 * 86400.0
"""Seconds for one member's test pairs."""


def on_a_device(order: Order) -> None:
    """Scores a member. What it says is said where its process is, and in the driver's log by what it returns.

    Raises BusyError when no device is free, WorkerError when the task's process or node is lost, and what scoring
    raises.
    """
    import ray

    with connected(1) as connection:
        now = devices_of(connection)
        kind = now.kind
        if not now.free:
            raise BusyError(f"of the Ray cluster's {now} none is free")
        sign = Path(order.at_work).resolve()
        device = {"num_cpus": 1} if kind == "CPU" else {"num_cpus": 0, "num_gpus": 1}
        task = ray.remote(_score).options(max_retries=0, **device)
        result = task.remote(order.as_line(), os.getcwd(), str(sign))
        begun, until = time.monotonic(), START_DEADLINE
        while not ray.wait([result], timeout=1.0)[0]:
            waited = time.monotonic() - begun
            if waited > (SCORED_S if sign.exists() else until):
                ray.cancel(result, force=True)
                if not sign.exists():
                    raise BusyError(f"no {kind} of the Ray cluster came free within {waited:.0f} s")
                raise WorkerError(f"scoring took longer than {SCORED_S:.0f} s and was ended")
        try:
            print(ray.get(result))
        except ray.exceptions.RayTaskError as error:
            cause = error.cause
            raise (cause if isinstance(cause, SuiteError) else error) from None
        except ray.exceptions.RayError as error:
            raise WorkerError(f"the process that scored is gone: {str(error).splitlines()[0]}") from None


def _score(line: str, folder: str, sign: str) -> str:
    """What the task does: as if it were in the sweep's folder. Returns what it has to say."""
    import io

    Path(sign).touch()
    secrets.receive()
    os.chdir(folder)
    said = io.StringIO()
    score(Order.of_line(line), log_console(said))
    return said.getvalue()
