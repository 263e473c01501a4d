"""Can each node reach each other on the ports that Ray and torch.distributed take?

Every node listens on two fresh ports, one of the system's choice, as torch.distributed, gloo and NCCL do, and one of
those Ray gives its workers. Every other connects and reads a word that only this listener knows.
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
"""The ports that Ray's workers listen on unless ``ray start`` was told others."""

KNOCK_S = 3.0
"""Seconds for a connection: the kernel repeats a lost first packet after 1 s, so a full queue alone is no fault."""

TRIES = 20

CHOSEN, OF_RAY, NODE = "torch.distributed (a port of the system's choice)", "Ray's workers (10002-19999)", "Ray's node"


@dataclass(frozen=True)
class Door:
    """A port where a node listens; ``word`` is empty where somebody else answers, as Ray's own processes do."""

    use: str
    address: str
    port: int
    word: str = ""


class Porch:
    """The listening ports of one process, answered by threads until it is closed."""

    def __init__(self, address: str) -> None:
        self._word = secrets.token_hex(8)
        self._sockets = {CHOSEN: socket.create_server((address, 0)), OF_RAY: _one_of(address, RAY_WORKERS)}
        self.doors = [Door(use, address, s.getsockname()[1], self._word) for use, s in self._sockets.items()]
        for listening in self._sockets.values():
            threading.Thread(target=self._answer, args=(listening,), daemon=True).start()

    def close(self) -> None:
        """Ends the listening."""
        for listening in self._sockets.values():
            listening.close()

    def _answer(self, listening: socket.socket) -> None:
        while True:
            try:
                caller, _ = listening.accept()
                with caller:
                    caller.sendall(self._word.encode())
            except OSError:
                if listening.fileno() < 0:
                    return


def _one_of(address: str, ports: range) -> socket.socket:
    for port in random.sample(ports, TRIES):
        try:
            return socket.create_server((address, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    raise OSError(errno.EADDRINUSE, f"{TRIES} ports of {ports.start}-{ports.stop - 1} were all taken")


def knock(doors: list[Door], seconds: float = KNOCK_S) -> list[tuple[Door, str]]:
    """Returns the doors that did not answer in time, each with the reason."""
    if not doors:
        return []
    with ThreadPoolExecutor(min(32, len(doors))) as threads:
        told = list(threads.map(lambda door: _knock(door, seconds), doors))
    return [(door, why) for door, why in zip(doors, told, strict=True) if why]


def _knock(door: Door, seconds: float) -> str:
    try:
        with socket.create_connection((door.address, door.port), timeout=seconds) as connection:
            heard = connection.recv(len(door.word), socket.MSG_WAITALL).decode() if door.word else ""
    except TimeoutError:
        return f"no answer in {seconds:g} s"
    except OSError as error:
        return error.strerror or str(error)
    return "" if heard == door.word else "another program answered"
