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
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from launch.diagnostics.probes import Node

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


_listening: dict[str, list[socket.socket]] = {}
"""The sockets of this process by address; threads serve each until it is closed."""


def listen(address: str) -> list[Endpoint]:
    """Listens on new ports of an address, instead of those of an earlier call; returns them."""
    for listening in _listening.pop(address, []):
        listening.close()
    word = secrets.token_hex(8)
    sockets = {CHOSEN: socket.create_server((address, 0)), OF_RAY: _listen_for_ray(address)}
    _listening[address] = list(sockets.values())
    for listening in sockets.values():
        threading.Thread(target=_serve, args=(listening, word), daemon=True).start()
    return [Endpoint(use, address, s.getsockname()[1], word) for use, s in sockets.items()]


def _serve(listening: socket.socket, word: str) -> None:
    while True:
        try:
            caller, _ = listening.accept()
            with caller:
                caller.sendall(word.encode())
        except OSError:
            if listening.fileno() < 0:
                return


def _listen_for_ray(address: str) -> socket.socket:
    for port in random.sample(RAY_WORKERS, TRIES):
        try:
            return socket.create_server((address, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    raise OSError(errno.EADDRINUSE, f"{TRIES} ports of 10002-19999 are all in use")


def connect_check(others: list[tuple[Node, Endpoint]]) -> list[tuple[Node, Endpoint, str]]:
    """Returns the endpoints of other nodes that did not answer in time, each with the reason."""
    with ThreadPoolExecutor(32) as threads:
        reasons = threads.map(_connect, [endpoint for _, endpoint in others])
        return [(other, endpoint, why) for (other, endpoint), why in zip(others, reasons, strict=True) if why]


def _connect(endpoint: Endpoint) -> str:
    try:
        with socket.create_connection((endpoint.address, endpoint.port), timeout=CONNECT_S) as connection:
            received = connection.recv(len(endpoint.word), socket.MSG_WAITALL).decode() if endpoint.word else ""
    except TimeoutError:
        return f"no answer in {CONNECT_S:g} s"
    except OSError as error:
        return error.strerror or str(error)
    return "" if received == endpoint.word else "another program answered"


def web_check(url: str) -> None:
    """Requests a URL. Any HTTP status is an answer; raises OSError or ValueError if there is none in 5 s."""
    try:
        urllib.request.urlopen(url, timeout=5).close()
    except urllib.error.HTTPError:
        return
    except urllib.error.URLError as error:
        raise OSError(str(error.reason)) from None
