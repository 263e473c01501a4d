r"""Hosts on one machine: network namespaces with their own addresses, and links with delay and bandwidth.

    host 0   eth0 192.0.2.1 --\                      each host is a network namespace, isolated from this machine's
    host 1   eth0 192.0.2.2 ---- bridge, or          network; the addresses are reserved for documentation (RFC 5737)
    host 2   eth0 192.0.2.3 --/  user-space link

Needs root and Debian's iproute2. Delay and bandwidth come from tc's netem if the kernel has it, otherwise from
``launch.benchmarks.userspace_link``.
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

from launch.benchmarks import userspace_link
from suite.errors import SettingError
from suite.pipeline.planning.simulate import Link

INTERFACE = "eth0"
NETWORK = "192.0.2."

PORT = 29500
"""The rendezvous port of a job's workers, on the first host."""

MTU = 32 << 10
"""Packet size of the user-space link in bytes: large, so that Python handles few packets."""

_PACKETS = 100_000
"""Queue length of a delayed link; never reached."""

_OURS = re.compile(r"gpipe-(\d+)-\d+-\w+")
_serial = count()


class Hosts:
    """A context with ``number`` hosts; with a link, their traffic has its latency and bandwidth.

    Raises SettingError if namespaces cannot be created. The end of the context kills all processes in them; namespaces
    of a killed process are removed by the next one that creates hosts.
    """

    def __init__(self, number: int, link: Link | None = None) -> None:
        self.link = link
        prefix = f"gpipe-{os.getpid()}-{next(_serial)}"
        self.names = [f"{prefix}-{i}" for i in range(number)]
        self.addresses = [f"{NETWORK}{i + 1}" for i in range(number)]
        self._switch = f"{prefix}-switch"
        self._userspace_link: subprocess.Popen[str] | None = None
        self.how = "veth pairs and a bridge"
        """How the links are implemented."""

    def __enter__(self) -> Self:
        try:
            for name in _namespaces():
                if not Path(f"/proc/{name.split('-')[1]}").exists():
                    _clear(name)
            for name in (self._switch, *self.names):
                _run("ip", "netns", "add", name)
                _run("ip", "-n", name, "link", "set", "lo", "up")
                self._set_tcp_options(name)
            self._connect()
            for name, address in zip(self.names, self.addresses, strict=True):
                _run("ip", "-n", name, "address", "add", f"{address}/24", "dev", INTERFACE)
                _run("ip", "-n", name, "link", "set", INTERFACE, "up")
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
            if name in (*self.names, self._switch):
                _clear(name)

    def command(self, host: int, arguments: Sequence[str]) -> list[str]:
        """Returns the command that runs ``arguments`` on a host."""
        return ["ip", "netns", "exec", self.names[host], *arguments]

    def cut_off(self, host: int) -> None:
        """Takes a host's switch port down: all its traffic is lost silently."""
        assert self._userspace_link is None, "a host on the user-space link has no switch port"
        _run("ip", "-n", self._switch, "link", "set", f"port{host}", "down")

    def _set_tcp_options(self, name: str) -> None:
        """Uses reno, which every kernel has, without slow start after idle."""
        for setting in ("tcp_congestion_control=reno", "tcp_slow_start_after_idle=0"):
            key, value = setting.split("=")
            _run("ip", "netns", "exec", name, "sh", "-c", f"echo {value} > /proc/sys/net/ipv4/{key}")

    def _connect(self) -> None:
        if self.link is not None and not self._has_netem():
            self._start_userspace_link(self.link)
            return
        _run("ip", "-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", self._switch, "link", "set", "bridge", "up")
        for i, name in enumerate(self.names):
            port = f"port{i}"
            _run(
                *("ip", "link", "add", INTERFACE, "netns", name, "type", "veth"),
                *("peer", "name", port, "netns", self._switch),
            )
            _run("ip", "-n", self._switch, "link", "set", port, "master", "bridge", "up")
            if self.link is not None:
                self.how = "tc netem"
                _run("tc", "-n", name, "qdisc", "add", "dev", INTERFACE, "root", "netem", *_netem(self.link))

    def _has_netem(self) -> bool:
        try:
            _run("tc", "-n", self._switch, "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms")
            _run("tc", "-n", self._switch, "qdisc", "del", "dev", "lo", "root")
        except SettingError:
            return False
        return True

    def _start_userspace_link(self, link: Link) -> None:
        self.how = "a user-space link, because this kernel has no netem"
        command = [sys.executable, userspace_link.__file__, str(link.latency_s), str(link.bytes_per_s), *self.names]
        self._userspace_link = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._userspace_link.stdout is not None
        if self._userspace_link.stdout.readline() != "ready\n":
            raise SettingError("could not start the user-space link between the hosts; it needs /dev/net/tun and root")
        for name in self.names:
            _run("ip", "-n", name, "link", "set", INTERFACE, "mtu", str(MTU))


def in_host(
    rank: int, _world: int, _rendezvous: str, names: Sequence[str], target: Callable[..., Any], *args: Any
) -> Any:
    """Runs a worker's ``target(rank, world, rendezvous, *args)`` on the host of its rank; for ``run_processes``."""
    userspace_link.enter(names[rank])
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    return target(rank, len(names), f"tcp://{NETWORK}1:{PORT}", *args)


def _netem(link: Link) -> list[str]:
    return [
        *("delay", f"{link.latency_s * 1e6:.0f}us", "rate", f"{link.bytes_per_s * 8:.0f}bit"),
        *("limit", str(_PACKETS)),
    ]  # fmt: skip


def _namespaces() -> list[str]:
    """Returns the namespaces created by this program, in any process."""
    listed = [line.split()[0] for line in _run("ip", "netns", "list").splitlines()]
    return [name for name in listed if _OURS.fullmatch(name)]


def _clear(name: str) -> None:
    for pid in _run("ip", "netns", "pids", name).split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    _run("ip", "netns", "delete", name)


def _run(*command: str) -> str:
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
