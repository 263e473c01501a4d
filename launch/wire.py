r"""A wire in user space: carries packets between hosts, each as late as its link has it, where the kernel has no netem.

    host 0 -- eth0 --\                       a packet leaves when the line of its host is free, keeps it for
    host 1 -- eth0 ---- [ held back ] ---->  bytes / bandwidth, and arrives latency later, as tc's netem has it
    host 2 -- eth0 --/

Run as a program it gives each named namespace a TUN device called eth0 and ends with its standard input. It sees only
what these devices are given, so nothing can leave for anywhere else.
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
"""Of an IPv4 packet."""


def enter(namespace: str) -> None:
    """Moves this thread, and those it will start, into a named network namespace. Raises OSError."""
    descriptor = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {namespace}")
    finally:
        os.close(descriptor)


def _end_of(namespace: str) -> int:
    """Returns the wire's end of a new eth0 in a namespace."""
    enter(namespace)
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", b"eth0", _IFF_TUN | _IFF_NO_PI))
    return descriptor


def carry(ends: list[int], latency_s: float, bytes_per_s: float, until: int) -> None:
    """Carries IPv4 packets between ``ends`` until the descriptor ``until`` is closed; host i has an address that ends
    with i + 1. What is for nobody is dropped."""
    free = [0.0] * len(ends)
    held: list[tuple[float, int, int, bytes]] = []  # (due, number, to, packet)
    count = 0
    while True:
        timeout = max(0.0, held[0][0] - time.monotonic()) if held else None
        ready, _, _ = select.select([*ends, until], [], [], timeout)
        if until in ready:
            return
        for at, end in enumerate(ends):
            packet = os.read(end, MOST_BYTES) if end in ready else b""
            if len(packet) < 20 or packet[0] >> 4 != 4 or not 1 <= packet[19] <= len(ends):
                continue
            free[at] = max(time.monotonic(), free[at]) + len(packet) / bytes_per_s
            count += 1
            heapq.heappush(held, (free[at] + latency_s, count, packet[19] - 1, packet))
        while held and held[0][0] <= time.monotonic():
            _, _, to, packet = heapq.heappop(held)
            os.write(ends[to], packet)


def main() -> None:
    """``wire.py LATENCY_S BYTES_PER_S NAMESPACE...``: prints a line when the devices are there."""
    latency, rate, *namespaces = sys.argv[1:]
    ends = [_end_of(namespace) for namespace in namespaces]
    print("ready", flush=True)
    carry(ends, float(latency), float(rate), sys.stdin.fileno())


if __name__ == "__main__":
    main()
