"""The dispatcher between the driver and its agents: an actor that hands out attempts and collects what workers send.

driver --begin, stop--> dispatcher --next_attempt, over--> agents, one per device, which start the workers
driver <-----news------ dispatcher <--heartbeat, report--- agents
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from launch.worker.attempt import Attempt
from suite.errors import SuiteError

Report = SuiteError | None
"""How a worker ended: its error, or None if it finished the job."""


class Dispatcher:
    """A Ray actor on the driver's node. ``next_attempt`` and ``over`` wait until they have an answer."""

    def __init__(self) -> None:
        self._attempt: Attempt | None = None
        """The current attempt; None before the first."""
        self._store = ""
        """Address of the rendezvous store, as "host port"."""
        self._stopped: bool | None = False
        """Whether the current attempt must end; None after the last attempt."""
        self._reports: dict[int, Report] = {}
        self._heartbeats: dict[int, bytes] = {}
        self._changed = asyncio.Condition()

    async def begin(self, attempt: Attempt) -> None:
        async with self._changed:
            self._attempt, self._stopped, self._reports, self._heartbeats = attempt, False, {}, {}
            self._changed.notify_all()

    async def stop(self, last: bool = False) -> None:
        """Makes all agents end their workers; with ``last`` the agents end as well."""
        async with self._changed:
            self._stopped = None if last else True
            self._changed.notify_all()

    async def news(self) -> tuple[dict[int, Report], dict[int, bytes]]:
        """Returns of the current attempt's workers, by rank, the reports of those that have ended, and the heartbeats
        that have come since the last call."""
        heartbeats, self._heartbeats = self._heartbeats, {}
        return self._reports, heartbeats

    async def set_store(self, address: str) -> None:
        """Sets the address of the rendezvous store. The first attempt waits for it."""
        async with self._changed:
            self._store = address
            self._changed.notify_all()

    async def next_attempt(self, after: int) -> tuple[Attempt, str] | None:
        """Waits for the attempt after number ``after``; returns it and the store's address, None after the last."""
        await self._until(lambda: self._stopped is None or (bool(self._store) and self._number > after))
        return None if self._stopped is None or self._attempt is None else (self._attempt, self._store)

    async def over(self, number: int) -> None:
        """Waits until an attempt's workers must be ended."""
        await self._until(lambda: self._stopped is not False or self._number != number)

    async def heartbeat(self, rank: int, number: int, heartbeat: bytes) -> None:
        if number == self._number:
            self._heartbeats[rank] = heartbeat

    async def report(self, rank: int, number: int, report: Report) -> None:
        if number == self._number:
            self._reports[rank] = report

    @property
    def _number(self) -> int:
        return 0 if self._attempt is None else self._attempt.number

    async def _until(self, condition: Callable[[], bool]) -> None:
        async with self._changed:
            await self._changed.wait_for(condition)
