"""Where a run executes: this machine; other places change parts of it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.base.cluster import Cluster
from experiments.base.workload import Measurable
from launch.supervision.supervisor import Launcher
from launch.worker.attempt import Attempt
from launch.worker.devices import this_machine
from suite.log import Log
from suite.pipeline.planning.devices import Device, this_device
from suite.pipeline.planning.placement import Placement

if TYPE_CHECKING:
    from experiments.base.experiment import Experiment
    from launch.worker.measure import LayerMeasurements


class Backend:
    """The devices of a run, their measurement, and the launcher of its workers; here plain processes."""

    @property
    def workers(self) -> int | None:
        """How many workers it starts, if it cannot start another number."""
        return None

    def cluster(self) -> Cluster:
        """Returns the available devices."""
        return this_machine()

    def measure_layers(
        self,
        work: Measurable,
        cluster: Cluster,
        workers: int,
        threads: int,
        log_file: Path,
        data: Path | None,
        log: Log,
    ) -> list[LayerMeasurements]:
        """Measures a workload's layers, on ``data`` if any, in ``workers`` concurrent processes with ``threads``
        threads each. The libraries' output goes to ``log_file``."""
        return measure_here(work, cluster, workers, threads, log_file)

    def probe_device(self, cluster: Cluster, log: Log) -> Device:
        """Returns one of a cluster's devices with measured rates; takes seconds."""
        return this_device(cluster.bytes_per_device)

    def started(self, attempt: Attempt, planned: Placement | None) -> AbstractContextManager[Launcher]:
        """A context with a launcher; it places workers as planned, or elsewhere if that is not possible."""
        from launch.backends.processes import ProcessLauncher

        return nullcontext(ProcessLauncher())

    def check_workers(self, experiment: Experiment) -> None:
        """Raises SettingError when it cannot start the experiment's K x R workers, whatever its devices."""

    def close(self) -> None:
        """Disconnects, if there is a connection."""


def measure_here(
    work: Measurable, cluster: Cluster, workers: int, threads: int, log_file: Path
) -> list[LayerMeasurements]:
    from launch.backends.processes import run_processes
    from launch.worker.measure import measure_layers

    use_gpu = cluster.kind == "gpu"
    return run_processes(measure_layers, workers, work, threads, use_gpu, log_file, cluster.logits_bytes)
