"""Where a run goes: this machine, or the Ray cluster of RAY_ADDRESS."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from experiments.cluster import Cluster
from experiments.planned import Pricer
from launch.devices import this_machine
from launch.pricing import pricer
from launch.supervise import Launcher
from launch.worker import Job, speaker
from suite.pipeline.placement import Placement


class Site:
    """This machine, its workers plain processes."""

    def cluster(self) -> Cluster:
        """Returns the devices there are now."""
        return this_machine()

    def pricer(self, cache: Path, data: Path | None, say: Callable[[str], None]) -> Pricer:
        """Returns what measures layer costs, kept in ``cache``, on ``data`` if any."""
        return pricer(cache, say)

    def close(self) -> None:
        """Lets go of what was opened to look."""

    @contextmanager
    def started(self, job: Job, planned: Placement | None) -> Iterator[Launcher]:
        """A context with what starts workers, where they were planned or where there is room now."""
        from launch.spawn import Processes

        yield Processes()


def site_of(launcher: str) -> Site:
    """Returns where runs go that are started by ``ray`` or by ``spawn``."""
    if launcher == "spawn":
        return Site()
    from launch.cluster.site import LocalRay, RayCluster

    return RayCluster() if os.environ.get("RAY_ADDRESS") else LocalRay()


def said(job: Job) -> Callable[[str], None]:
    """Returns what tells the person at the terminal of a run."""
    return speaker(job.run.messages)
