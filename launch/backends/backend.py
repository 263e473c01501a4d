"""Where a run executes: this machine; other places change parts of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TypeVar

from experiments.base.cluster import Cluster
from experiments.base.experiment import Experiment
from launch.backends.processes import LocalLauncher, start_forkserver
from launch.supervision.supervisor import Launcher
from launch.worker.attempt import Attempt
from launch.worker.devices import this_machine
from suite.log import Log
from suite.pipeline.planning.placement import Placement

Result = TypeVar("Result")


class Backend:
    """The devices of a run, work on them, and the launcher of its workers; here plain processes."""

    workers: int | None = None
    """How many workers it starts, if it cannot start another number."""

    def cluster(self) -> Cluster:
        """Returns the available devices."""
        return this_machine()

    def on_free_devices(
        self, task: Callable[[], Result], cluster: Cluster, devices: int, log: Log, data: Path | None = None
    ) -> Result:
        """Returns what a function returns on a machine where so many devices are free and the folder ``data`` is."""
        return task()

    def prepare_processes(self, preload: Sequence[str] = ()) -> None:
        """Begins what ``on_free_devices`` needs to start processes that also import ``preload``; returns at once."""
        start_forkserver(preload)

    def open_launcher(self, attempt: Attempt, planned: Placement | None) -> AbstractContextManager[Launcher]:
        """A context with a launcher; it places workers as planned, or elsewhere if that is not possible."""
        return nullcontext(LocalLauncher())

    def check_workers(self, experiment: Experiment) -> None:
        """Raises SettingError when it cannot start the experiment's K x R workers, whatever its devices."""

    def close(self) -> None:
        """Disconnects, if there is a connection."""
