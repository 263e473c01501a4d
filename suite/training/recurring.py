"""What is done again and again beside the work, from a thread of its own: signs of life, gauges, a look at a file."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress

END_S = 5.0
"""Seconds that a call which is under way gets to come back, when no other shall follow."""


def print_failure(error: Exception) -> None:
    """Prints a traceback to standard error, which of a worker is its log."""
    traceback.print_exception(error, file=sys.stderr)


class Recurring:
    """Calls ``what`` every ``period`` seconds, from ``start`` to ``end``; an exception ends none but its own call."""

    def __init__(
        self, what: Callable[[], None], period: float, name: str, failed: Callable[[Exception], object] = print_failure
    ) -> None:
        """``failed`` is told of an exception, once while the same comes again."""
        self._what, self._period, self._failed = what, period, failed
        self._told = ""
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

    @property
    def died(self) -> bool:
        """Whether the thread is gone without ``end``."""
        return not self._ended.is_set() and self._thread.ident is not None and not self._thread.is_alive()

    def call(self) -> None:
        """Makes one call now, from this thread."""
        try:
            self._what()
            self._told = ""
        except Exception as error:
            told, self._told = self._told, repr(error)
            if told != self._told:
                with suppress(Exception):  # a closed standard error, for instance
                    self._failed(error)

    def _run(self) -> None:
        while not self._ended.wait(self._period):
            self.call()
