"""The doctor's probe: one object in a process on a node that gathers facts there."""

from __future__ import annotations

import time
import urllib.error
import urllib.request

from launch.diagnostics import node_facts, ports
from launch.storage_sync import storage_marker

WEB_S = 5.0
"""Seconds for a web server to start its answer."""


class NodeProbe:
    """Examines the node that has ``address``; does not depend on Ray."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._listener: ports.PortListener | None = None

    def facts(self, folders: list[str]) -> node_facts.Facts:
        """Returns the node's facts."""
        return node_facts.gather(folders)

    def clock(self) -> float:
        """Returns the node's clock, in seconds since 1970."""
        return time.time()

    def write(self, location: str, mark: str, name: str, text: str) -> str:
        """Writes a marker; returns the reason of a failure, or an empty string."""
        return storage_marker.write(location, mark, name, text)

    def unread(self, location: str, mark: str, expected: dict[str, str]) -> dict[str, str]:
        """Returns the markers that cannot be read back unchanged, each with the reason."""
        return storage_marker.unread(location, mark, expected)

    def remove(self, location: str, mark: str) -> None:
        """Removes the markers."""
        storage_marker.remove(location, mark)

    def listen(self) -> list[ports.Endpoint]:
        """Listens on new ports instead of those of an earlier call."""
        if self._listener is not None:
            self._listener.close()
        self._listener = ports.PortListener(self._address)
        return self._listener.endpoints

    def connect_check(self, endpoints: list[ports.Endpoint]) -> list[tuple[ports.Endpoint, str]]:
        """Returns the endpoints that cannot be reached from here, each with the reason."""
        return ports.connect_check(endpoints)

    def web(self, url: str) -> str:
        """Requests a URL; returns why there was no answer, or an empty string. Any HTTP status is an answer."""
        try:
            with urllib.request.urlopen(url, timeout=WEB_S):
                return ""
        except urllib.error.HTTPError:
            return ""
        except urllib.error.URLError as error:
            return str(error.reason)
        except (OSError, ValueError) as error:
            return str(error)
