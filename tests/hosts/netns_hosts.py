r"""Hosts on one machine: network namespaces with their own addresses, and links with delay and bandwidth.

    host 0   eth0 192.0.2.1 --\                      each host is a network namespace, isolated from this machine's
    host 1   eth0 192.0.2.2 ---- user-space link     network; the addresses are reserved for documentation (RFC 5737)
    host 2   eth0 192.0.2.3 --/

Needs root, /dev/net/tun and Debian's iproute2. Delay and bandwidth come from ``userspace_link``, so that
no kernel needs tc's netem.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any, Self

from suite.errors import SettingError
from suite.pipeline.planning.simulate import Link
from tests.hosts import userspace_link

INTERFACE = "eth0"
NETWORK = "192.0.2."

PORT = 29500
"""The rendezvous port of a job's workers, on the first host."""

MTU = 32 << 10
"""Packet size of the user-space link in bytes: large, so that Python handles few packets."""

_OURS = re.compile(r"gpipe-(\d+)-\d+-\w+")
_serial = count()


class Hosts:
    """A context with ``number`` hosts; their traffic has the latency and bandwidth of ``link``.

    Raises SettingError if namespaces cannot be created. The end of the context kills all processes in them; namespaces
    of a killed process are removed by the next one that creates hosts.
    """

    def __init__(self, number: int, link: Link) -> None:
        self.link = link
        self.prefix = f"gpipe-{os.getpid()}-{next(_serial)}-"
        self.names = [f"{self.prefix}{i}" for i in range(number)]
        self.addresses = [f"{NETWORK}{i + 1}" for i in range(number)]
        self._userspace_link: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        try:
            for name in _namespaces():
                if not Path(f"/proc/{name.split('-')[1]}").exists():
                    _clear(name)
            for name in self.names:
                self._add(name)
            self._connect()
            for name, address in zip(self.names, self.addresses, strict=True):
                run("ip", "-n", name, "address", "add", f"{address}/24", "dev", INTERFACE)
                run("ip", "-n", name, "link", "set", INTERFACE, "up")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kills the hosts' processes and removes the hosts."""
        if self._userspace_link is not None:
            self._userspace_link.kill()
            self._userspace_link.wait()
        for name in _namespaces():
            if name.startswith(self.prefix):
                _clear(name)

    def _add(self, name: str) -> None:
        """Adds a namespace. Its TCP uses reno, which every kernel has, without slow start after idle."""
        run("ip", "netns", "add", name)
        run("ip", "-n", name, "link", "set", "lo", "up")
        for setting in ("tcp_congestion_control=reno", "tcp_slow_start_after_idle=0"):
            key, value = setting.split("=")
            run("ip", "netns", "exec", name, "sh", "-c", f"echo {value} > /proc/sys/net/ipv4/{key}")

    def _connect(self) -> None:
        """Gives each host its interface."""
        command = [sys.executable, userspace_link.__file__, str(self.link.latency_s), str(self.link.bytes_per_s)]
        self._userspace_link = subprocess.Popen(
            [*command, *self.names], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._userspace_link.stdout is not None
        if self._userspace_link.stdout.readline() != "ready\n":
            raise SettingError("could not start the user-space link between the hosts; it needs /dev/net/tun and root")
        for name in self.names:
            run("ip", "-n", name, "link", "set", INTERFACE, "mtu", str(MTU))


def in_host(
    rank: int, _world: int, _rendezvous: str, names: Sequence[str], target: Callable[..., Any], *args: Any
) -> Any:
    """Runs a worker's ``target(rank, world, rendezvous, *args)`` on the host of its rank; for ``run_processes``."""
    userspace_link.enter(names[rank])
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    return target(rank, len(names), f"tcp://{NETWORK}1:{PORT}", *args)


def _namespaces() -> list[str]:
    """Returns the namespaces created by this program, in any process."""
    listed = [line.split()[0] for line in run("ip", "netns", "list").splitlines()]
    return [name for name in listed if _OURS.fullmatch(name)]


def _clear(name: str) -> None:
    for pid in run("ip", "netns", "pids", name).split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    run("ip", "netns", "delete", name)


def run(*command: str) -> str:
    """Returns the output of a command. Raises SettingError if it fails or does not exist."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
    except FileNotFoundError as error:
        raise SettingError(f"hosts on this machine need {command[0]} from Debian's iproute2; install it") from error
    except subprocess.CalledProcessError as error:
        raise SettingError(
            f"hosts on this machine need network namespaces and root: {' '.join(command)!r} failed with "
            f"{error.stderr.strip() or error.stdout.strip()!r}"
        ) from error
