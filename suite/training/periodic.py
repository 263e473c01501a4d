"""A thread that calls a function periodically beside the training: heartbeats, system metrics, polls of a file."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress


def print_failure(error: Exception) -> None:
    """Prints a traceback to standard error, which is a worker's log."""
    traceback.print_exception(error, file=sys.stderr)


class PeriodicThread:
    """Calls ``what`` every ``period`` seconds from ``start`` to ``end``, or in its context. An exception ends only its
    own call."""

    def __init__(
        self, what: Callable[[], None], period: float, name: str, failed: Callable[[Exception], object] = print_failure
    ) -> None:
        """``failed`` gets an exception, once while the same one repeats."""
        self._what, self._period, self._failed = what, period, failed
        self._last_error = ""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name=name)

    def __enter__(self) -> None:
        self.start()

    def __exit__(self, *_: object) -> None:
        self.end()

    def start(self) -> None:
        """Starts the thread; the first call is one period later."""
        self._thread.start()

    def end(self, within: float = 5.0) -> bool:
        """Ends the thread. Returns False if its call still hangs, in a disk or a driver, after ``within`` seconds."""
        self._ended.set()
        self._thread.join(within)
        return not self._thread.is_alive()

    @property
    def died(self) -> bool:
        """Whether the thread ended without a call of ``end``."""
        return not self._ended.is_set() and self._thread.ident is not None and not self._thread.is_alive()

    def call(self) -> None:
        """Makes one call now, in the caller's thread."""
        try:
            self._what()
            self._last_error = ""
        except Exception as error:
            previous, self._last_error = self._last_error, repr(error)
            if previous != self._last_error:
                with suppress(Exception):  # such as a closed standard error
                    self._failed(error)

    def _run(self) -> None:
        while not self._ended.wait(self._period):
            self.call()
