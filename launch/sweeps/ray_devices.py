"""The devices of a Ray cluster, which members share with other users. Training reserves its devices itself; scoring is
a Ray task, which reserves one."""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

import ray

from launch.backends.ray_connection import Connection, address, answering
from launch.inference.score import score_from_cli
from launch.sweeps.devices import Devices, MemberProcess, Work
from launch.sweeps.tasks import Task
from launch.terminal import Terminal
from suite.errors import SuiteError, first_line
from suite.training.checkpoint import parse_choice


class RayDevices(Devices):
    """GPUs if the cluster has any, else CPUs, of the nodes that answer."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self.kind = connection, connection.kind()
        nodes = connection.nodes(self.kind)
        super().__init__(sum(node.total for node in nodes), self.kind == "GPU")
        self.described = f"{self.total} {self.kind}s on {len(nodes)} node{'' if len(nodes) == 1 else 's'}"
        self._variables = {"RAY_ADDRESS": address() or connection.name()}
        self._heartbeats: dict[Task, float] = {}
        """When the heartbeats of a run that was started were last noted before."""

    def free(self, running: Collection[Task]) -> int:
        """Returns how many devices nobody uses. Ray does not count those of a member before its workers are there; they
        are kept for it, because a measurement waits only some minutes for a device."""
        with answering("which devices are free"):
            nodes = self._connection.nodes(self.kind)
        total, free = sum(node.total for node in nodes), sum(node.free for node in nodes)
        begins = [task for task in running if task.what == "train" and _noted(task) == self._heartbeats[task]]
        return min(free - sum(task.devices for task in begins), total - sum(task.devices for task in running))

    def start(self, task: Task, running: Collection[Task]) -> Work:
        self._heartbeats[task] = _noted(task)
        return MemberProcess(task, "ray", self._variables) if task.what == "train" else RayScoring(task, self.kind)


def _noted(task: Task) -> float:
    """Returns when the heartbeats of a task's run were last noted; 0 if never."""
    with suppress(OSError):
        return task.run.heartbeats.stat().st_mtime
    return 0.0


class RayScoring:
    """``gpipe score`` in a Ray task, which waits for its device as long as it takes."""

    def __init__(self, task: Task, kind: str) -> None:
        _, _, settings, _, step, _, run = task.arguments("ray")
        device = {"num_cpus": 1} if kind == "CPU" else {"num_cpus": 0, "num_gpus": 1}
        scoring = ray.remote(_score).options(max_retries=0, **device)
        self._log = task.log.resolve()
        self._result = scoring.remote(os.getcwd(), run, settings, step, self._log)

    def poll(self) -> int | None:
        if not ray.wait([self._result], timeout=0)[0]:
            return None
        try:
            ray.get(self._result)
        except ray.exceptions.RayError as error:
            cause = getattr(error, "cause", error)
            with self._log.open("a") as file:
                file.write(f"error: {cause if isinstance(cause, SuiteError) else first_line(error)}\n")
            return 1
        return 0

    def end(self) -> None:
        ray.cancel(self._result, force=True)

    def kill(self) -> None:
        """Nothing is left of a cancelled task."""


def _score(folder: str, run: str, settings: str, step: str, log: Path) -> None:
    """The Ray task: scores in the sweep's folder, and writes into the member's log."""
    os.chdir(folder)
    with log.open("a", buffering=1) as file:
        score_from_cli(run, settings, Terminal(file=file), parse_choice(step))
