"""Hosts whose links have no delay, connected by a bridge, from which one can be cut off."""

from collections.abc import Sequence

from suite.pipeline.planning.simulate import Link
from tests.hosts.netns_hosts import INTERFACE, Hosts, run


def on_host(hosts: Hosts, host: int, arguments: Sequence[str]) -> list[str]:
    """Returns the command that runs ``arguments`` on a host."""
    return ["ip", "netns", "exec", hosts.names[host], *arguments]


class BridgedHosts(Hosts):
    """The bridge is in a namespace of its own, which goes with the hosts."""

    def __init__(self, number: int) -> None:
        super().__init__(number, Link())
        self._switch = f"{self.prefix}switch"

    def _connect(self) -> None:
        self._add(self._switch)
        run("ip", "-n", self._switch, "link", "add", "bridge", "type", "bridge")
        run("ip", "-n", self._switch, "link", "set", "bridge", "up")
        for i, name in enumerate(self.names):
            port = f"port{i}"
            run(
                *("ip", "link", "add", INTERFACE, "netns", name, "type", "veth"),
                *("peer", "name", port, "netns", self._switch),
            )
            run("ip", "-n", self._switch, "link", "set", port, "master", "bridge", "up")

    def cut_off(self, host: int) -> None:
        """Takes a host's switch port down: all its traffic is lost silently."""
        run("ip", "-n", self._switch, "link", "set", f"port{host}", "down")
