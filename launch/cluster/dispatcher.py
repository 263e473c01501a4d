"""What the driver and its agents share: an actor that gives out attempts and collects how each worker ended.

driver --begin, stop--> dispatcher --the attempt, its end--> agents, one a device, that start the workers
driver <----reports---- dispatcher <--------report---------- agents
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from suite.errors import SuiteError

Report = SuiteError | None
"""How a worker ended: None for one that came to the end of the job."""


class Dispatcher:
    """An actor of Ray, on the driver's node. A call waits until what it asks for exists."""

    def __init__(self) -> None:
        self._attempt: dict[str, Any] = {}
        """The current attempt, as agents receive it; empty before the first."""
        self._store = ""
        """Address of the store in which an attempt's workers meet."""
        self._stopped: bool | None = False
        """Whether the present attempt is to end; None after the last."""
        self._reports: dict[int, Report] = {}
        self._changed = asyncio.Condition()

    async def begin(self, attempt: dict[str, Any]) -> None:
        """Has all agents begin with an attempt."""
        async with self._changed:
            self._attempt, self._stopped, self._reports = attempt, False, {}
            self._changed.notify_all()

    async def stop(self, last: bool = False) -> None:
        """Has all agents end their workers; after the ``last`` attempt themselves."""
        async with self._changed:
            self._stopped = None if last else True
            self._changed.notify_all()

    async def reports(self) -> dict[int, Report]:
        """Returns how workers of the present attempt ended, of those that did, by rank."""
        return self._reports

    async def set_store(self, address: str) -> None:
        """Says where workers meet. All attempts wait for it."""
        async with self._changed:
            self._store = address
            self._changed.notify_all()

    async def next_attempt(self, after: int) -> tuple[dict[str, Any], str] | None:
        """Returns the attempt that follows another one, and the store's address; None when there will be none."""
        await self._until(
            lambda: self._stopped is None or (bool(self._store) and self._attempt.get("attempt", 0) > after)
        )
        return None if self._stopped is None else (self._attempt, self._store)

    async def over(self, attempt: int) -> None:
        """Returns when an attempt's workers are to be ended."""
        await self._until(lambda: self._stopped is not False or self._attempt["attempt"] != attempt)

    async def report(self, rank: int, attempt: int, report: Report) -> None:
        """Says how a worker ended."""
        if attempt == self._attempt["attempt"]:
            self._reports[rank] = report

    async def _until(self, true: Callable[[], bool]) -> None:
        async with self._changed:
            await self._changed.wait_for(true)
