"""The driver's handle of its agents. Ray Train starts one on each device; they serve all attempts on these devices."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import ray

from experiments.base.experiment import Experiment
from launch.backends.ray_connection import END_S, POLL_S, START_DEADLINE
from launch.backends.ray_dispatcher import Dispatcher, Report
from launch.ray_nodes import own_node, start_on
from launch.supervision.watchdog import Watchdog
from launch.worker.attempt import Attempt, threads_of
from suite.errors import WorkerError


class AgentGroup:
    def __init__(self, attempt: Attempt, experiment: Experiment, nodes: Sequence[str]) -> None:
        """Starts the agents. ``nodes`` has the node id of each rank; ``attempt`` is the first."""
        self.workers = len(nodes)
        self._watchdog: Watchdog | None = None
        """That of the current attempt."""
        self._dispatcher = start_on(own_node(), Dispatcher, max_concurrency=8 + 4 * self.workers)
        self._failure: Exception | None = None
        # an event, because Thread.is_alive is wrong after an interrupted join
        self._ended = threading.Event()
        trainer = _trainer(attempt, experiment, nodes, {"dispatcher": self._dispatcher})
        # in a thread, because in the main thread Ray Train handles an interrupt itself: it silently ends the process
        # with exit code 0
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

    def begin(self, attempt: Attempt, watchdog: Watchdog) -> None:
        """Starts an attempt; its number must be greater than the previous one's. ``watchdog`` gets the heartbeats."""
        self._watchdog = watchdog
        ray.get(self._dispatcher.begin.remote(attempt), timeout=START_DEADLINE)

    def reports(self) -> dict[int, Report]:
        """Waits POLL_S, gives the watchdog the new heartbeats, and returns the reports of the workers that have ended,
        by rank. Raises the error that ended the agents, if any."""
        if self._ended.wait(POLL_S):
            raise self._failure or WorkerError("the Ray Train agents ended before their workers")
        assert self._watchdog is not None
        reports: dict[int, Report]
        self._watchdog.paused = True  # silence is no worker's while the dispatcher does not answer
        reports, heartbeats = ray.get(self._dispatcher.news.remote(), timeout=START_DEADLINE)
        self._watchdog.receive(heartbeats)
        self._watchdog.paused = False
        return reports

    def stop(self) -> bool:
        """Ends all workers; returns whether all agents confirm it in time, and are ready for another attempt."""
        ray.get(self._dispatcher.stop.remote(), timeout=END_S)
        polls = int(END_S / POLL_S)
        return any(len(self.reports()) == self.workers for _ in range(polls))

    def end(self) -> None:
        """Ends the agents, and waits for Ray Train."""
        if self.alive:
            self._dispatcher.stop.remote(last=True)
        self.wait()

    def wait(self) -> None:
        """Waits for Ray Train to end, at most END_S seconds."""
        self._ended.wait(END_S)


def _trainer(attempt: Attempt, experiment: Experiment, nodes: Sequence[str], config: dict[str, Any]) -> Any:
    """Returns the trainer that runs an agent on each device. Ray Train's ranks equal ours, because it numbers them node
    by node in this order."""
    import ray.train
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    from launch.backends.ray_agent import serve

    return DataParallelTrainer(
        serve,
        train_loop_config=config,
        backend_config=_backend_config(),
        scaling_config=ray.train.ScalingConfig(  # type: ignore[call-arg]
            num_workers=len(nodes),
            use_gpu=attempt.use_gpu,
            resources_per_worker={"GPU": 1} if attempt.use_gpu else {"CPU": 1},
            label_selector=[{"ray.io/node-id": node} for node in nodes],
        ),
        run_config=ray.train.RunConfig(
            name=f"ray-train/{attempt.number}",
            storage_path=str(attempt.folder),
            worker_runtime_env={
                "env_vars": {"OMP_NUM_THREADS": str(threads_of(experiment)), "TOKENIZERS_PARALLELISM": "false"}
            },
            # our supervisor decides about retries: Ray Train cannot distinguish a bug from a machine lost without
            # notice, or a repeated failure from a new one, and cannot replan for another K
            failure_config=ray.train.FailureConfig(
                max_failures=0,
                controller_failure_limit=0,  # type: ignore[call-arg]  # Ray Train v2's types lack it
                max_preemption_failures=0,
            ),
        ),
    )


def _backend_config() -> Any:
    """Returns what Ray Train sets up on each device. It creates no process group: that would connect the agents, while
    the workers create their own."""
    from ray.train.backend import Backend, BackendConfig

    class VisibleGpus(Backend):
        share_cuda_visible_devices = True
        """NCCL copies directly between GPUs only if a process sees both."""

    class AgentConfig(BackendConfig):
        backend_cls = VisibleGpus

    return AgentConfig()
