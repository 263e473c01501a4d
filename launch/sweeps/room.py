"""The devices that a sweep's members share: this machine's, or those of a Ray cluster that others may use too."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from launch.devices import cores
from launch.ray_train import check_reachable
from launch.sweeps.lanes import Share
from suite.errors import WorkerError


@dataclass(frozen=True)
class Devices:
    """What a Ray cluster has now: GPUs if it has any, else CPUs."""

    kind: Literal["GPU", "CPU"]
    total: int
    free: int
    nodes: int

    def __str__(self) -> str:
        return f"{self.total} {self.kind}s on {self.nodes} node{'' if self.nodes == 1 else 's'}"


def devices_of_cluster() -> Devices:
    """Returns the devices of the nodes that are alive, of the cluster that this process is connected to."""
    import ray

    nodes: list[dict[str, Any]] = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    kind: Literal["GPU", "CPU"] = "GPU" if any(node["Resources"].get("GPU") for node in nodes) else "CPU"
    total = int(sum(node["Resources"].get(kind, 0) for node in nodes))
    with_some = sum(1 for node in nodes if node["Resources"].get(kind))
    return Devices(kind, total, min(total, int(_free(ray).get(kind, 0))), with_some)


def _free(ray: Any) -> dict[str, float]:
    found: dict[str, float] = ray.available_resources()
    return found


@contextmanager
def connected(least: int) -> Iterator[None]:
    """A context in which this process is connected to the cluster of RAY_ADDRESS; without one, to a Ray of ``least``
    CPUs or as many as there are, that is started here and ends with the context, or with this process.

    Raises PlacementError when nothing answers at that address.
    """
    import ray

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    on_terminate = signal.getsignal(signal.SIGTERM)
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        if address := os.environ.get("RAY_ADDRESS"):
            check_reachable(address)
            ray.init(**quiet)
        else:
            ray.init(address="local", num_cpus=max(cores(), least), include_dashboard=False, **quiet)
    finally:
        signal.signal(signal.SIGTERM, on_terminate)  # Ray sets one that exits without a word
    try:
        yield
    finally:
        ray.shutdown()


def address_of_ray() -> str:
    """Returns the address by which other processes reach the cluster that this one is connected to."""
    import ray

    return os.environ.get("RAY_ADDRESS") or str(ray.get_runtime_context().gcs_address)


class OnRay:
    """The devices of the cluster that this process is connected to."""

    def look(self) -> Share:
        """Asks Ray. Devices in use are others' or our own: Ray does not say whose. Raises WorkerError when its head is
        gone."""
        try:
            now = devices_of_cluster()
        except Exception as error:
            said = (str(error).splitlines() or [type(error).__name__])[0]
            raise WorkerError(
                f"Ray could not say which devices there are: {said}; see that its head runs, and run the sweep again"
            ) from error
        return Share(now.total, now.total - now.free)


@dataclass(frozen=True)
class Here:
    """This machine's devices, which nobody is asked for."""

    total: int

    def look(self) -> Share:
        """Always the same."""
        return Share(self.total)
