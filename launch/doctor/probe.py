"""What the doctor has at work on a node: one object, made in a process there, that answers its questions."""

from __future__ import annotations

import time
import urllib.error
import urllib.request

from launch.doctor import facts, markers, ports

WEB_S = 5.0
"""Seconds in which a web server must begin to answer."""


class Probe:
    """Answers for the node whose address is given; nothing in it depends on Ray."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._porch: ports.Porch | None = None

    def facts(self, folders: list[str]) -> facts.Facts:
        """Returns what the node says of itself."""
        return facts.gather(folders)

    def clock(self) -> float:
        """Returns the node's clock, in seconds since 1970."""
        return time.time()

    def write(self, location: str, mark: str, name: str, text: str) -> str:
        """Writes a marker; returns why it could not."""
        return markers.write(location, mark, name, text)

    def unread(self, location: str, mark: str, expected: dict[str, str]) -> dict[str, str]:
        """Returns the markers that are not there as they were written, each with the reason."""
        return markers.unread(location, mark, expected)

    def remove(self, location: str, mark: str) -> None:
        """Removes the markers."""
        markers.remove(location, mark)

    def listen(self) -> list[ports.Door]:
        """Listens on fresh ports, in place of those of an earlier call."""
        if self._porch is not None:
            self._porch.close()
        self._porch = ports.Porch(self._address)
        return self._porch.doors

    def knock(self, doors: list[ports.Door]) -> list[tuple[ports.Door, str]]:
        """Returns the doors of other nodes that cannot be reached from here."""
        return ports.knock(doors)

    def web(self, url: str) -> str:
        """Asks a web server for anything; returns why nothing came back. An answer of any status is one."""
        try:
            with urllib.request.urlopen(url, timeout=WEB_S):
                return ""
        except urllib.error.HTTPError:
            return ""
        except urllib.error.URLError as error:
            return str(error.reason)
        except (OSError, ValueError) as error:
            return str(error)
