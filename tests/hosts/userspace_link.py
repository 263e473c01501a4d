r"""A link in user space: delays packets between hosts if the kernel has no netem.

    host 0 -- eth0 --\                   a packet leaves when its host's line is free, occupies it for
    host 1 -- eth0 ---- [ delayed ] -->  bytes / bandwidth, and arrives one latency later, as with tc's netem
    host 2 -- eth0 --/

As a program it creates a TUN device eth0 in each named namespace and exits when its standard input closes. It only
forwards packets between these devices.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import select
import struct
import sys
import time

_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_CLONE_NEWNET = 0x40000000

MOST_BYTES = 65535
"""Largest IPv4 packet."""


def enter(namespace: str) -> None:
    """Moves this thread and its future threads into a network namespace. Raises OSError."""
    descriptor = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {namespace}")
    finally:
        os.close(descriptor)


def _open_tun(namespace: str) -> int:
    """Returns the descriptor of a new TUN device eth0 in a namespace."""
    enter(namespace)
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", b"eth0", _IFF_TUN | _IFF_NO_PI))
    return descriptor


def forward(tuns: list[int], latency_s: float, bytes_per_s: float, until: int) -> None:
    """Carries IPv4 packets between ``tuns`` until the descriptor ``until`` is closed; host i has an address that
    ends with i + 1. Packets for other addresses are dropped."""
    free = [0.0] * len(tuns)
    delayed: list[tuple[float, int, int, bytes]] = []  # (due, number, to, packet)
    count = 0
    while True:
        timeout = max(0.0, delayed[0][0] - time.monotonic()) if delayed else None
        ready, _, _ = select.select([*tuns, until], [], [], timeout)
        if until in ready:
            return
        for at, tun in enumerate(tuns):
            packet = os.read(tun, MOST_BYTES) if tun in ready else b""
            if len(packet) < 20 or packet[0] >> 4 != 4 or not 1 <= packet[19] <= len(tuns):
                continue
            free[at] = max(time.monotonic(), free[at]) + len(packet) / bytes_per_s
            count += 1
            heapq.heappush(delayed, (free[at] + latency_s, count, packet[19] - 1, packet))
        while delayed and delayed[0][0] <= time.monotonic():
            _, _, to, packet = heapq.heappop(delayed)
            os.write(tuns[to], packet)


def main() -> None:
    """``userspace_link.py LATENCY_S BYTES_PER_S NAMESPACE...``: prints a line when the devices exist."""
    latency, rate, *namespaces = sys.argv[1:]
    tuns = [_open_tun(namespace) for namespace in namespaces]
    print("ready", flush=True)
    forward(tuns, float(latency), float(rate), sys.stdin.fileno())


if __name__ == "__main__":
    main()
