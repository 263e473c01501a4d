"""Checks that nodes reach each other on the ports that Ray and torch.distributed use.

Every node listens on two new ports: one that the system chooses, as for torch.distributed, gloo and NCCL, and one of
Ray's worker range. Every other node connects and reads a word that only this listener knows.
"""

from __future__ import annotations

import errno
import random
import secrets
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

RAY_WORKERS = range(10002, 20000)
"""Default ports of Ray's workers (``ray start`` can change them)."""

CONNECT_S = 3.0
"""Seconds for a connection: the kernel resends a lost first packet after 1 s, so a full queue alone is no fault."""

TRIES = 20

CHOSEN, OF_RAY, NODE = "torch.distributed (a port of the system's choice)", "Ray's workers (10002-19999)", "Ray's node"


@dataclass(frozen=True)
class Endpoint:
    """A listening port of a node; ``word`` is empty if another program listens there, such as Ray's own processes."""

    use: str
    address: str
    port: int
    word: str = ""


class PortListener:
    """The listening ports of one process, served by threads until it is closed."""

    def __init__(self, address: str) -> None:
        self._word = secrets.token_hex(8)
        self._sockets = {CHOSEN: socket.create_server((address, 0)), OF_RAY: _listen_on_one(address, RAY_WORKERS)}
        self.endpoints = [Endpoint(use, address, s.getsockname()[1], self._word) for use, s in self._sockets.items()]
        for listening in self._sockets.values():
            threading.Thread(target=self._serve, args=(listening,), daemon=True).start()

    def close(self) -> None:
        """Stops listening."""
        for listening in self._sockets.values():
            listening.close()

    def _serve(self, listening: socket.socket) -> None:
        while True:
            try:
                caller, _ = listening.accept()
                with caller:
                    caller.sendall(self._word.encode())
            except OSError:
                if listening.fileno() < 0:
                    return


def _listen_on_one(address: str, ports: range) -> socket.socket:
    for port in random.sample(ports, TRIES):
        try:
            return socket.create_server((address, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    raise OSError(errno.EADDRINUSE, f"{TRIES} ports of {ports.start}-{ports.stop - 1} are all in use")


def connect_check(endpoints: list[Endpoint], seconds: float = CONNECT_S) -> list[tuple[Endpoint, str]]:
    """Returns the endpoints that did not answer in time, each with the reason."""
    if not endpoints:
        return []
    with ThreadPoolExecutor(min(32, len(endpoints))) as threads:
        failures = list(threads.map(lambda endpoint: _connect(endpoint, seconds), endpoints))
    return [(endpoint, why) for endpoint, why in zip(endpoints, failures, strict=True) if why]


def _connect(endpoint: Endpoint, seconds: float) -> str:
    try:
        with socket.create_connection((endpoint.address, endpoint.port), timeout=seconds) as connection:
            received = connection.recv(len(endpoint.word), socket.MSG_WAITALL).decode() if endpoint.word else ""
    except TimeoutError:
        return f"no answer in {seconds:g} s"
    except OSError as error:
        return error.strerror or str(error)
    return "" if received == endpoint.word else "another program answered"
