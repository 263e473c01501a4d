"""The driver's StageActors: one for each rank, in a placement group that holds their devices."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from launch.backends.ray_connection import POLL_S, START_DEADLINE
from launch.backends.stage_actor import Ended, StageActor
from launch.worker.attempt import Attempt
from suite.errors import WorkerDiedError, typed_line

HOLD_S = 15.0
"""Seconds for Ray to give this run the devices that it chose."""

STARTS_PER_S = 20
"""Devices that Ray gives in a second, and actors that it starts."""

END_S = 15.0
"""Longest wait for the next stage process to end."""


class StageActors:
    """Serves all attempts on the same devices. An actor that has died is started again in the next attempt."""

    def __init__(self, nodes: Sequence[str], kind: str, threads: int | None) -> None:
        """Asks for a device of a ``kind``, GPU or CPU, on the node of each rank, by node id. Each stage has so many
        ``threads``; None: its share of the cores."""
        self.workers, self._kind, self._threads = len(nodes), kind, threads
        self.hold_s = HOLD_S + self.workers / STARTS_PER_S
        """Seconds for Ray to give these devices."""
        self._start_s = START_DEADLINE + self.workers / STARTS_PER_S
        self.usable = True
        """Whether another attempt may use them: no actor has failed to start in time, as on a node that is lost."""
        self._group = placement_group(
            [{kind: 1}] * self.workers, "PACK", bundle_label_selector=[{"ray.io/node-id": node} for node in nodes]
        )
        self._actors: dict[int, Any] = {}
        self._devices: dict[int, tuple[str, list[str]]] = {}
        """Node and GPU of each rank."""
        self._streams: dict[Any, int] = {}
        """The rank of each actor that runs a stage, by what it sends."""
        self._attempt = 0

    def has_devices(self) -> bool:
        """Waits for the devices; returns False if Ray does not give them in ``hold_s``. Two runs that start at the same
        moment see the same free devices."""
        return bool(ray.wait([self._group.ready()], timeout=self.hold_s)[0])

    def begin(self, attempt: Attempt) -> None:
        """Starts the actors that are not there, and an attempt on all. Its number must be greater than the previous
        one's. Raises WorkerDiedError for an actor that dies while it starts, or takes too long."""
        until = time.monotonic() + self._start_s
        for rank in {*range(self.workers)} - self._actors.keys():
            where = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=rank)
            actor = ray.remote(concurrency_groups={"stop": 1})(StageActor)  # type: ignore[call-overload]
            options: dict[str, Any] = {f"num_{kind.lower()}s": int(kind == self._kind) for kind in ("GPU", "CPU")}
            self._actors[rank] = actor.options(scheduling_strategy=where, **options).remote(rank, self._threads)
        devices = {rank: actor.device.remote() for rank, actor in self._actors.items() if rank not in self._devices}
        for rank, device in devices.items():
            self._devices[rank] = self._answer(rank, device, until)
        store = self._answer(0, self._actors[0].open_store.remote(), until)
        gpus: dict[str, list[str]] = {}
        for node, own in self._devices.values():
            gpus[node] = sorted({*gpus.get(node, []), *own})
        # the same on all nodes: other threads would compute other bits
        attempt = replace(attempt, local_workers=max(Counter(node for node, _ in self._devices.values()).values()))
        self._attempt, self._streams = attempt.number, {}
        for rank, actor in self._actors.items():
            run = actor.run.options(num_returns="streaming")
            self._streams[run.remote(attempt, store, gpus[self._devices[rank][0]])] = rank

    def receive(self) -> tuple[dict[int, bytes], dict[int, Ended]]:
        """Waits POLL_S; returns what has come since, by rank: heartbeats, and the ends of stages."""
        heartbeats: dict[int, bytes] = {}
        ended: dict[int, Ended] = {}
        waiting, timeout_s = list(self._streams), POLL_S
        while waiting:
            waiting, _ = ray.wait(waiting, num_returns=len(waiting), timeout=timeout_s)
            for stream in waiting:
                rank = self._streams[stream]
                news = self._next(rank, stream)
                if isinstance(news, bytes):
                    heartbeats[rank] = news
                else:
                    ended[rank] = news
                    del self._streams[stream]
            waiting, timeout_s = [stream for stream in waiting if stream in self._streams], 0.0
        return heartbeats, ended

    def end_early(self) -> None:
        """Asks all stages to save after this step and to end, by the first one."""
        self._actors[0].end_early.options(concurrency_group="stop").remote()

    def stop(self) -> set[str]:
        """Ends all stage processes. Once no other actor has confirmed it for END_S, kills the late ones, which the next
        attempt starts again; returns the ids of their nodes."""
        until, left = time.monotonic() + END_S, len(self._streams)
        for rank in self._streams.values():
            self._actors[rank].stop.options(concurrency_group="stop").remote(self._attempt)
        while self._streams and time.monotonic() < until:
            self.receive()
            if len(self._streams) < left:
                until, left = time.monotonic() + END_S, len(self._streams)
        late = {self._devices[rank][0] for rank in self._streams.values()}
        for rank in self._streams.values():
            self._forget(rank)
        self._streams = {}
        return late

    def end(self) -> None:
        """Ends the actors, and gives the devices back."""
        with suppress(Exception):  # of many types, where the head is lost; then the actors are too
            remove_placement_group(self._group)

    def _next(self, rank: int, stream: Any) -> bytes | Ended:
        try:
            news: bytes | Ended = ray.get(next(stream))
        except RayError as error:
            return self._death(rank, error)
        return news

    def _answer(self, rank: int, call: Any, until: float) -> Any:
        try:
            return ray.get(call, timeout=max(0.0, until - time.monotonic()))
        except GetTimeoutError:
            self.usable = False
            raise WorkerDiedError(rank, f"its Ray actor did not start in {self._start_s:.0f} s", "start") from None
        except RayError as error:
            raise self._death(rank, error) from None

    def _death(self, rank: int, error: RayError) -> WorkerDiedError:
        """Forgets an actor, and returns why it died."""
        self._forget(rank)
        if not isinstance(error, RayActorError):
            return WorkerDiedError(rank, typed_line(getattr(error, "cause", error)))
        if error.preempted:
            return WorkerDiedError(rank, "its node was preempted", "preemption")
        if error.actor_init_failed:
            return WorkerDiedError(rank, f"its Ray actor could not start: {str(error).strip().splitlines()[-1]}")
        return WorkerDiedError(rank, "its Ray actor ended (killed, or out of memory)")

    def _forget(self, rank: int) -> None:
        """Kills an actor: one that only does not answer holds its device."""
        self._devices.pop(rank, None)
        if (actor := self._actors.pop(rank, None)) is not None:
            ray.kill(actor)
