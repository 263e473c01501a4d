"""The driver's side of its agents: Ray Train starts one on each device, and they stay for all attempts on these."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from experiments.experiment import Experiment
from launch.cluster.connection import END_S
from launch.cluster.dispatcher import Dispatcher, Report
from launch.worker import Job, threads_of
from suite.errors import WorkerError

START_DEADLINE = 180
"""Seconds for all agents to be placed and started."""

LOOK_S = 0.25
"""Between two looks at how workers ended."""


class Agents:
    """The agents of some devices, begun."""

    def __init__(self, job: Job, experiment: Experiment, nodes: Sequence[str]) -> None:
        """``nodes`` are those of the devices, by rank. ``job`` is the first that they will do."""
        self.workers = len(nodes)
        self._dispatcher = _dispatcher(self.workers)
        self._failure: Exception | None = None
        # an event, for a thread whose join was interrupted passes for dead
        self._ended = threading.Event()
        trainer = _trainer(job, experiment, nodes, self._dispatcher)
        # in a thread of its own, because in the main one Ray Train answers an interrupt itself, by ending the process
        # with exit code 0 and no word
        threading.Thread(target=self._fit, args=[trainer], daemon=True).start()

    def _fit(self, trainer: Any) -> None:
        try:
            trainer.fit()
        except Exception as error:
            self._failure = error
        finally:
            self._ended.set()

    @property
    def alive(self) -> bool:
        """Whether Ray Train still runs them all."""
        return not self._ended.is_set()

    def begin(self, job: Job) -> None:
        """Has them begin with an attempt, the number of which follows that of the last."""
        import ray

        attempt = {
            "folder": str(job.folder), "data": str(job.data), "cells": list(job.cells), "recipe": asdict(job.recipe),
            "use_gpu": job.use_gpu, "resume": job.resume, "attempt": job.attempt, "faults": job.faults,
            "step_s": job.step_s, "shrunk": job.shrunk, "workers": self.workers,
        }  # fmt: skip
        ray.get(self._dispatcher.begin.remote(attempt), timeout=START_DEADLINE)

    def reports(self) -> dict[int, Report]:
        """Returns how those workers ended that did, by rank, after a moment. Raises what ended the agents."""
        import ray

        if self._ended.wait(LOOK_S):
            raise self._failure or WorkerError("the agents of Ray Train ended before their workers")
        found: dict[int, Report] = ray.get(self._dispatcher.reports.remote(), timeout=START_DEADLINE)
        return found

    def stop(self) -> bool:
        """Has all workers ended; returns whether all agents say so in time, and can begin with another attempt."""
        import ray

        ray.get(self._dispatcher.stop.remote(), timeout=END_S)
        looks = int(END_S / LOOK_S)
        return any(len(self.reports()) == self.workers for _ in range(looks))

    def end(self) -> None:
        """Has the agents end themselves, and waits for Ray Train."""
        if self.alive:
            self._dispatcher.stop.remote(last=True)
        self.wait()

    def wait(self) -> None:
        """Waits for Ray Train to end, for so long as that may take."""
        self._ended.wait(END_S)


def _dispatcher(workers: int) -> Any:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    where = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor = ray.remote(Dispatcher).options(num_cpus=0, scheduling_strategy=where, max_concurrency=8 + 4 * workers)
    return actor.remote()


def _trainer(job: Job, experiment: Experiment, nodes: Sequence[str], dispatcher: Any) -> Any:
    """Returns what runs an agent on each device; Ray Train's ranks are ours, for it counts them node by node in this
    order."""
    import ray.train
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    from launch.cluster.agent import serve
    from launch.cluster.meeting import Meeting

    return DataParallelTrainer(
        serve,
        train_loop_config={"dispatcher": dispatcher},
        backend_config=Meeting(),
        scaling_config=ray.train.ScalingConfig(  # type: ignore[call-arg]
            num_workers=len(nodes),
            use_gpu=job.use_gpu,
            resources_per_worker={"GPU": 1} if job.use_gpu else {"CPU": 1},
            label_selector=[{"ray.io/node-id": node} for node in nodes],
        ),
        run_config=ray.train.RunConfig(
            name=f"ray-train/{job.attempt}",
            storage_path=str(job.folder),
            worker_runtime_env={
                "env_vars": {"OMP_NUM_THREADS": str(threads_of(experiment)), "TOKENIZERS_PARALLELISM": "false"}
            },
            # our supervisor decides what is tried again: Ray Train's retry cannot tell a bug from a lost machine that
            # it was not warned of, nor the same failure from another, nor plan for another K
            failure_config=ray.train.FailureConfig(
                max_failures=0,
                controller_failure_limit=0,  # type: ignore[call-arg]  # of Ray Train v2, whose types lag behind
                max_preemption_failures=0,
            ),
        ),
    )
