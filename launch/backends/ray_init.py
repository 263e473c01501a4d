"""Joins, starts and leaves Ray; converts every failure to join a cluster to one sentence.

Ray reads its variables, such as RAY_AUTH_MODE, when it is imported: here and in ``launch.ray_nodes`` only on use.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
from typing import Any

from suite.errors import PlacementError

CONNECT_TIMEOUT_S = 5.0
"""Seconds for the head of a cluster to accept a connection; Ray itself would try for minutes."""


def join(address: str, alternative: str) -> None:
    """Connects to the Ray cluster at ``host:port``, or another form of address that Ray accepts.

    Raises PlacementError when nothing answers there or this Ray cannot join the cluster. ``alternative``, what else
    the user can do, is part of the message.
    """
    _check_reachable(address, alternative)
    from ray.exceptions import AuthenticationError

    try:
        init(address=address)
    except AuthenticationError:
        raise PlacementError(
            f"the Ray cluster at {address} rejects this token; set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN (or "
            "RAY_AUTH_TOKEN_PATH) to those of the cluster"
        ) from None
    except Exception as error:  # of many types: another version, no Ray process on this machine, a timeout
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise PlacementError(
            f"could not join the Ray cluster at {address}: {reason}; check that it has the same versions of Ray and "
            "Python, and that this machine is one of its nodes and has its token"
        ) from None


def init(**arguments: Any) -> None:
    """Starts or joins Ray without output; keeps this process's SIGTERM handler."""
    import ray
    import ray._private.utils

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")  # a call after shutdown fails, and starts no other Ray
    os.environ.setdefault("RAY_worker_niceness", "0")  # else a local Ray's processes, and so the stages, get 15
    # avoids Ray's warning about the devices that a worker without a GPU will see; our workers get their device from us
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    ray._private.utils.set_sigterm_handler = lambda handler: None  # Ray's handler exits silently
    on_terminate = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(log_to_driver=False, logging_level=logging.ERROR, **arguments)
    finally:
        signal.signal(signal.SIGTERM, on_terminate)  # Ray's C++ part installs one as well, which prints a stack


def shutdown() -> None:
    """Leaves Ray, and ends a local one; keeps this process's SIGTERM handler.

    Ray's C++ part removes the SIGTERM handler when it shuts down. Ray then needs a second or more to end its local
    processes, in which a SIGTERM would end this process silently. So the handler is restored in between.
    """
    import ray
    import ray._private.state

    on_terminate, disconnect = signal.getsignal(signal.SIGTERM), ray._private.state.state.disconnect

    def restore_and_disconnect() -> None:
        signal.signal(signal.SIGTERM, on_terminate)
        disconnect()  # type: ignore[no-untyped-call]

    ray._private.state.state.disconnect = restore_and_disconnect  # type: ignore[method-assign]
    try:
        ray.shutdown()
    finally:
        ray._private.state.state.disconnect = disconnect  # type: ignore[method-assign]
        signal.signal(signal.SIGTERM, on_terminate)


def _check_reachable(address: str, alternative: str) -> None:
    if "://" in address and not address.startswith("ray://"):
        raise PlacementError(
            f"{address} is the address of a dashboard, where jobs are submitted; give host:port of Ray itself, such as "
            f"head:6379, or {alternative}"
        )
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdigit():
        return
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise PlacementError(
            f"no Ray cluster answers at {address} ({error}); start one there (ray start --head), or {alternative}"
        ) from None
