"""What is done again and again beside the work, from a thread of its own: signs of life, gauges, a look at a file."""

from __future__ import annotations

import threading
from collections.abc import Callable

END_S = 5.0
"""Seconds that a call which is under way gets to come back, when no other shall follow."""


class Recurring:
    """Calls ``what`` every ``period`` seconds, from ``start`` to ``end``."""

    def __init__(self, what: Callable[[], None], period: float, name: str) -> None:
        self._what, self._period = what, period
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name=name)

    def start(self) -> None:
        """Returns at once; the first call is one period later."""
        self._thread.start()

    def end(self, within: float = END_S) -> bool:
        """Returns whether no call runs any more. One that hangs, in a disk or a driver, holds up nothing else."""
        self._ended.set()
        self._thread.join(within)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._ended.wait(self._period):
            self._what()
