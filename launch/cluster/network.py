"""The network interface that workers meet over.

torch.distributed takes the one that the host's name resolves to, which on many machines is loopback or another network
than the cluster's: workers of different nodes then wait for each other in vain. The right one is that which holds the
address by which Ray knows the node.
"""

from __future__ import annotations

import os
import socket

VARIABLES = {"GLOO_SOCKET_IFNAME": "{}", "NCCL_SOCKET_IFNAME": "={}"}
"""What gloo and NCCL go by; to NCCL a name alone is the beginning of several. What a person has set stays."""


def use_interface_of(address: str) -> str | None:
    """Has torch.distributed meet over the interface that holds an address; returns its name, None where none does.

    Must be called before the first process group is made.
    """
    name = interface_of(address)
    for variable, form in VARIABLES.items():
        if name is not None:
            os.environ.setdefault(variable, form.format(name))
    return name


def interface_of(address: str) -> str | None:
    """Returns the interface that holds an address."""
    import psutil

    families = (socket.AF_INET, socket.AF_INET6)
    for name, held in psutil.net_if_addrs().items():
        if any(one.family in families and one.address.partition("%")[0] == address for one in held):
            return str(name)
    return None
