r"""Hosts on one machine: network namespaces with addresses of their own, and links with delay and bandwidth.

    host 0   eth0 192.0.2.1 --\                    each host is a network namespace; processes in it see nothing of
    host 1   eth0 192.0.2.2 ---- bridge, or wire   this machine's network, and what they send can leave for nowhere:
    host 2   eth0 192.0.2.3 --/                    the addresses are those that RFC 5737 sets aside for examples

Needs root and Debian's iproute2. Delay and bandwidth are tc's netem where the kernel has it, otherwise ``launch.wire``.
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

from launch import wire
from suite.errors import SettingError
from suite.pipeline.simulate import Link

INTERFACE = "eth0"
NETWORK = "192.0.2."

PORT = 29500
"""Where the workers of one job meet, on the first host, which has it to itself."""

MTU = 32 << 10
"""Bytes of a packet of the wire: large, so that Python need not touch many."""

_PACKETS = 100_000
"""That a delayed link holds before it drops any; never so many are sent."""

_OURS = re.compile(r"gpipe-(\d+)-\d+-\w+")
_serial = count()


class Hosts:
    """A context in which ``number`` hosts are there; with a link, what each sends takes as long as the link says.

    Raises SettingError where namespaces cannot be made. The end of the context ends every process in them; those that a
    killed process left behind are cleared away by the next that makes hosts.
    """

    def __init__(self, number: int, link: Link | None = None) -> None:
        self.link = link
        mine = f"gpipe-{os.getpid()}-{next(_serial)}"
        self.names = [f"{mine}-{i}" for i in range(number)]
        self.addresses = [f"{NETWORK}{i + 1}" for i in range(number)]
        self._switch = f"{mine}-switch"
        self._wire: subprocess.Popen[str] | None = None
        self.how = "veth pairs and a bridge"
        """What the links are made of."""

    def __enter__(self) -> Self:
        try:
            for name in _namespaces():
                if not Path(f"/proc/{name.split('-')[1]}").exists():
                    _clear(name)
            for name in (self._switch, *self.names):
                _run("ip", "netns", "add", name)
                _run("ip", "-n", name, "link", "set", "lo", "up")
                self._steady(name)
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
        """Ends what runs in the hosts, and the hosts."""
        if self._wire is not None:
            self._wire.kill()
            self._wire.wait()
        for name in _namespaces():
            if name in (*self.names, self._switch):
                _clear(name)

    def command(self, host: int, arguments: Sequence[str]) -> list[str]:
        """Returns the command that runs another one in a host."""
        return ["ip", "netns", "exec", self.names[host], *arguments]

    def cut_off(self, host: int) -> None:
        """Pulls a host's cable out at the switch: what is sent to or from it is lost, and nobody is told."""
        assert self._wire is None, "a host on the wire has no cable to pull"
        _run("ip", "-n", self._switch, "link", "set", f"port{host}", "down")

    def _steady(self, name: str) -> None:
        """The plainest congestion control, which every kernel has, at full speed after a pause, too."""
        for setting in ("tcp_congestion_control=reno", "tcp_slow_start_after_idle=0"):
            key, value = setting.split("=")
            _run("ip", "netns", "exec", name, "sh", "-c", f"echo {value} > /proc/sys/net/ipv4/{key}")

    def _connect(self) -> None:
        if self.link is not None and not self._has_netem():
            self._lay_wire(self.link)
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

    def _lay_wire(self, link: Link) -> None:
        self.how = "a wire in user space, since this kernel has no netem"
        command = [sys.executable, wire.__file__, str(link.latency_s), str(link.bytes_per_s), *self.names]
        self._wire = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._wire.stdout is not None
        if self._wire.stdout.readline() != "ready\n":
            raise SettingError("the wire between the hosts could not be laid; /dev/net/tun is needed, and root")
        for name in self.names:
            _run("ip", "-n", name, "link", "set", INTERFACE, "mtu", str(MTU))


def in_host(
    rank: int, _world: int, _rendezvous: str, names: Sequence[str], target: Callable[..., Any], *args: Any
) -> Any:
    """Runs a worker's ``target(rank, world, rendezvous, *args)`` in the host of its rank; for ``run_processes``."""
    wire.enter(names[rank])
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    return target(rank, len(names), f"tcp://{NETWORK}1:{PORT}", *args)


def _netem(link: Link) -> list[str]:
    return [
        *("delay", f"{link.latency_s * 1e6:.0f}us", "rate", f"{link.bytes_per_s * 8:.0f}bit"),
        *("limit", str(_PACKETS)),
    ]  # fmt: skip


def _namespaces() -> list[str]:
    """Returns the namespaces that this program made, this process or another."""
    listed = [line.split()[0] for line in _run("ip", "netns", "list").splitlines()]
    return [name for name in listed if _OURS.fullmatch(name)]


def _clear(name: str) -> None:
    for pid in _run("ip", "netns", "pids", name).split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    _run("ip", "netns", "delete", name)


def _run(*command: str) -> str:
    """Returns what a command printed. Raises SettingError when it fails or is not there."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
    except FileNotFoundError as error:
        raise SettingError(f"hosts on this machine need {command[0]}, of Debian's iproute2; install it") from error
    except subprocess.CalledProcessError as error:
        raise SettingError(
            f"hosts on this machine need network namespaces, and root: {' '.join(command)!r} said "
            f"{error.stderr.strip() or error.stdout.strip()!r}"
        ) from error
