"""The way into Ray, and every reason for which it is refused as one sentence."""

from __future__ import annotations

import logging
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from suite.errors import PlacementError

REACH_S = 5.0
"""Seconds in which the head of a cluster takes a connection; Ray itself would try for minutes."""


def join(asked: str, otherwise: str) -> None:
    """Connects to the Ray cluster at ``host:port``, or at another form of address that Ray takes.

    Raises PlacementError when nothing answers there, ``otherwise`` being what else a person could do, or it is no
    cluster that this Ray can join.
    """
    _check_reachable(asked, otherwise)
    with _explained(asked):
        init(address=asked)


def init(**arguments: Any) -> None:
    """Starts or joins Ray, quietly; what this process does when it is told to end stays as it was."""
    import ray
    import ray._private.utils

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")  # who asks too late is told so, and starts no other Ray
    # Ray warns of a coming change in what a worker without a GPU sees; ours are told their device, and do not look
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    ray._private.utils.set_sigterm_handler = lambda handler: None  # Ray's exits without a word
    on_terminate = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(log_to_driver=False, logging_level=logging.ERROR, **arguments)
    finally:
        signal.signal(signal.SIGTERM, on_terminate)  # Ray's C++ part has one as well, which prints a stack


@contextmanager
def _explained(asked: str) -> Iterator[None]:
    from ray.exceptions import AuthenticationError

    try:
        yield
    except AuthenticationError:
        raise PlacementError(
            f"the Ray cluster at {asked} refuses this token; set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN (or "
            "RAY_AUTH_TOKEN_PATH) to those of the cluster"
        ) from None
    except Exception as error:  # of many types: another version, no Ray process on this machine, a time-out of Ray's
        told = " ".join(str(error).split())[:300] or type(error).__name__
        raise PlacementError(
            f"the Ray cluster at {asked} cannot be joined: {told}; see that its Ray and Python are of the versions "
            "here, that this machine is one of its nodes, and has its token"
        ) from None


def _check_reachable(asked: str, otherwise: str) -> None:
    if "://" in asked and not asked.startswith("ray://"):
        raise PlacementError(
            f"{asked} is the address of a dashboard, where jobs are submitted; give host:port of Ray itself, such as "
            f"head:6379, or {otherwise}"
        )
    host, _, port = asked.removeprefix("ray://").rpartition(":")
    if not port.isdigit():
        return
    try:
        socket.create_connection((host, int(port)), timeout=REACH_S).close()
    except OSError as error:
        raise PlacementError(
            f"no Ray cluster answers at {asked} ({error}); start one there (ray start --head), or {otherwise}"
        ) from None
