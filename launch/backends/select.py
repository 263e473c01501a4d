"""Selects where a run executes: this machine, or the Ray cluster of RAY_ADDRESS."""

from __future__ import annotations

import os
import tempfile

from launch.backends.backend import Backend
from launch.backends.processes import SOCKET
from suite.paths import check_socket_folder

RAY_SOCKET = "/ray/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"
"""A path of Ray's sockets in the folder of temporary files, with the largest process id."""


def select_backend(launcher: str) -> Backend:
    """Returns the backend for the launcher ``ray``, ``local`` or ``env``. Raises SettingError if the folder of
    temporary files has too long a path for a local Ray."""
    if launcher == "local":
        check_socket_folder(tempfile.gettempdir(), SOCKET)  # before a plan
        return Backend()
    if launcher == "env":
        from launch.backends.env_ranks import EnvBackend

        return EnvBackend()
    from launch.backends.ray_cluster import RayBackend, RayClusterBackend

    if os.environ.get("RAY_ADDRESS"):
        return RayClusterBackend()
    check_socket_folder(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp", RAY_SOCKET)
    return RayBackend()


def cluster_backend() -> Backend:
    """Returns the backend of RAY_ADDRESS's cluster, or this machine's if it is not set."""
    return select_backend("ray") if os.environ.get("RAY_ADDRESS") else Backend()
