"""Selects the network interface for torch.distributed.

By default torch.distributed uses the interface that the host name resolves to. On many machines that is loopback, or
not the cluster's network; workers on different nodes then never connect. The right interface is the one with the
address that Ray uses for the node.
"""

from __future__ import annotations

import os
import socket
from typing import Any

import psutil


def use_interface_of(address: str) -> None:
    """Makes torch.distributed use the interface with an address, if there is one, unless the user has set another. Call
    it before the first process group is created."""
    if (name := interface_of(address)) is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")  # a plain name would be a prefix


def interface_of(address: str) -> str | None:
    """Returns the name of the interface with an address, or None if there is none."""
    families = (socket.AF_INET, socket.AF_INET6)
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.family in families and entry.address.partition("%")[0] == address for entry in entries):
            return str(name)
    return None


def rendezvous_store(host: str) -> Any:
    """Opens torch's rendezvous store at an address of this machine and a free port. It asks for no token, so it listens
    on that address alone; on all of them only if no interface has it, as behind a translated address."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    if interface_of(host) is None:
        return TCPStore(host, 0, is_master=True, wait_for_workers=False)
    listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    port = listener.getsockname()[1]
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
