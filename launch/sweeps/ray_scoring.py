"""Scores a member in a Ray task, which reserves one device of the cluster."""

from __future__ import annotations

import os
import time
from contextlib import closing
from pathlib import Path

from launch.backends.ray_agents import START_DEADLINE
from launch.backends.ray_connection import Connection
from launch.sweeps.devices import cluster_devices
from launch.sweeps.member import MemberSpec, log_console, score
from suite.errors import BusyError, SuiteError, WorkerError, first_line

MAX_SCORING_S = 7 * 86400.0
"""Seconds to score one member."""


def score_on_ray(spec: MemberSpec) -> None:
    """Scores a member and prints the task's output.

    Raises BusyError when no device is free, WorkerError when the task's process or node is lost, and the errors of
    scoring.
    """
    import ray

    with closing(Connection()) as connection:
        connection.open(1)
        devices = cluster_devices(connection)
        kind = devices.kind
        if not devices.free:
            raise BusyError(f"none of the Ray cluster's {devices} is free")
        started_file = Path(spec.outcome_file).resolve().with_suffix(".started")  # exists once the task has its device
        started_file.unlink(missing_ok=True)
        device = {"num_cpus": 1} if kind == "CPU" else {"num_cpus": 0, "num_gpus": 1}
        task = ray.remote(_score).options(max_retries=0, **device)
        result = task.remote(spec.as_line(), os.getcwd(), str(started_file))
        start = time.monotonic()
        while not ray.wait([result], timeout=1.0)[0]:
            waited = time.monotonic() - start
            if waited > (MAX_SCORING_S if started_file.exists() else START_DEADLINE):
                ray.cancel(result, force=True)
                if not started_file.exists():
                    raise BusyError(f"no {kind} of the Ray cluster became free within {waited:.0f} s")
                raise WorkerError(f"scoring took longer than {MAX_SCORING_S:.0f} s and was stopped")
        try:
            print(ray.get(result))
        except ray.exceptions.RayTaskError as error:
            cause = error.cause
            raise (cause if isinstance(cause, SuiteError) else error) from None
        except ray.exceptions.RayError as error:
            raise WorkerError(f"the scoring process died: {first_line(error)}") from None


def _score(line: str, folder: str, started_file: str) -> str:
    """The Ray task: scores in the sweep's folder and returns its output."""
    import io

    Path(started_file).touch()
    os.chdir(folder)
    output = io.StringIO()
    score(MemberSpec.of_line(line), log_console(output))
    return output.getvalue()
