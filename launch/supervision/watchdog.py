"""Watches the heartbeats of one attempt's workers, and finds the one that blocks all others.

    silent      no heartbeat for its timeout while others send them: it is suspended, or its machine hangs
    stuck       sends heartbeats, waits for nobody, and its action does not end: an endless loop in a layer
    deadlock    all send heartbeats, and all wait: a message was lost

A worker that waits for another is never blamed before the one it waits for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from experiments.base.experiment import Experiment
from launch.error_log import log_error
from launch.supervision.stall_report import stall_report
from launch.worker.attempt import Attempt, run_logger
from launch.worker.heartbeat import ENDED, Heartbeat, parse_heartbeat, read_heartbeat, write_heartbeats
from launch.worker.run_plan import RunPlan
from launch.worker.save_requests import END_FILE
from suite.errors import WorkerError
from suite.pipeline.model.topology import RankCoord
from suite.training.periodic import PeriodicThread

PERIOD_S = 0.25

FirstStepHook = Callable[[int], None] | None

FIRST_HEARTBEAT_S = 300.0
"""Seconds from an attempt's start to the first heartbeat of a worker, and from there to the next worker's: a thousand
processes that import from a cold shared disk come one after the other."""

START_SILENCE_S = 30.0
"""Seconds that a worker may be silent before its first step, while it imports and compiles."""

END_S = 60.0
"""Seconds for the processes to end after the last worker has finished or failed."""

FRESH_S = 2.5
"""A worker whose last heartbeat is no older than this is alive: two and a half heartbeat periods."""


@dataclass(frozen=True)
class Verdict:
    """The worker that blocks an attempt, and why."""

    coord: RankCoord
    heartbeat: Heartbeat | None
    """Its last heartbeat; None if it never sent one."""
    message: str
    """One sentence."""
    short: str
    """A few words for the stall report."""


class StallDetector:
    """Finds the stalled worker. It reads no clock and no file, so tests can feed it any sequence of heartbeats."""

    def __init__(self, coords: Sequence[RankCoord]) -> None:
        self._coords = coords
        self._numbers: dict[int, int] = dict.fromkeys((coord.rank for coord in coords), 0)
        self._silence_s: dict[int, float] = dict.fromkeys(self._numbers, 0.0)
        self._arrived = set[int]()
        """Ranks that have sent a heartbeat."""

    def update(self, heartbeats: Mapping[int, Heartbeat], elapsed_s: float) -> Verdict | None:
        """Takes the workers' latest heartbeats by rank, ``elapsed_s`` after the previous call; returns a verdict if
        there is a stall."""
        if new := heartbeats.keys() - self._arrived:
            self._arrived |= new
            self._silence_s |= dict.fromkeys(self._silence_s.keys() - self._arrived, 0.0)
        for coord in self._coords:
            heartbeat = heartbeats.get(coord.rank)
            if heartbeat is not None and heartbeat.number != self._numbers[coord.rank]:
                self._numbers[coord.rank], self._silence_s[coord.rank] = heartbeat.number, 0.0
            else:
                self._silence_s[coord.rank] += elapsed_s
        ended = {rank for rank, heartbeat in heartbeats.items() if heartbeat.action in ENDED}
        working = [coord for coord in self._coords if coord.rank not in ended]
        if not working:
            return self._find_unended(heartbeats)
        return self._find_silent(working, heartbeats) or self._find_stuck(working, heartbeats)

    def _find_unended(self, heartbeats: Mapping[int, Heartbeat]) -> Verdict | None:
        coord = min(self._coords, key=lambda coord: self._silence_s[coord.rank])
        if (silence_s := self._silence_s[coord.rank]) <= END_S:
            return None
        message = f"all workers have finished, but {silence_s:.0f} s later their processes are still running"
        return Verdict(coord, heartbeats[coord.rank], message, "its process does not end")

    def _find_silent(self, working: Sequence[RankCoord], heartbeats: Mapping[int, Heartbeat]) -> Verdict | None:
        fresh = {rank for rank, silence_s in self._silence_s.items() if silence_s < FRESH_S}
        for coord in sorted(working, key=lambda coord: -self._silence_s[coord.rank]):
            heartbeat, silence_s = heartbeats.get(coord.rank), self._silence_s[coord.rank]
            if heartbeat is None:
                if silence_s > FIRST_HEARTBEAT_S:
                    missing = sum(other.rank not in heartbeats for other in working)
                    count = f" ({missing} of {len(self._coords)} workers sent none)" if missing > 1 else ""
                    since = "the last other worker came" if heartbeats else "the start"
                    message = f"{coord} sent no heartbeat in {silence_s:.0f} s since {since}{count}"
                    return Verdict(coord, None, message, "no heartbeat yet")
                continue
            timeout_s = START_SILENCE_S if heartbeat.steps_done == 0 else heartbeat.action_timeout_s
            # if all are silent at once, the folder or this machine is more likely the cause
            others_alive = len(self._coords) == 1 or bool(fresh - {coord.rank})
            if silence_s > (timeout_s if others_alive else 3 * timeout_s):
                message = (
                    f"{coord} on {heartbeat.host} has sent no heartbeat for {silence_s:.0f} s, last seen at "
                    f"{heartbeat.at}"
                )
                return Verdict(coord, heartbeat, message, f"no heartbeat for {silence_s:.0f} s")
        return None

    def _find_stuck(self, working: Sequence[RankCoord], heartbeats: Mapping[int, Heartbeat]) -> Verdict | None:
        known = [(coord, heartbeats[coord.rank]) for coord in working if coord.rank in heartbeats]
        late = [(coord, heartbeat) for coord, heartbeat in known if heartbeat.elapsed_s > heartbeat.current_timeout_s]
        late.sort(key=lambda pair: -pair[1].elapsed_s)
        for coord, heartbeat in late:
            if not heartbeat.waiting:
                message = f"{coord} on {heartbeat.host} has been at {heartbeat.at} for {heartbeat.elapsed_s:.0f} s"
                message += f", longer than the {heartbeat.current_timeout_s:.0f} s that one action may take"
                layer = f" in layer {heartbeat.layer}" if heartbeat.layer is not None else ""
                return Verdict(coord, heartbeat, message, f"stuck{layer} for {heartbeat.elapsed_s:.0f} s")
        if late and len(late) == len(working):
            coord, heartbeat = late[0]
            waits = f"{heartbeat.elapsed_s:.0f} s for {heartbeat.waiting}"
            message = (
                f"all workers wait for one another, {coord} on {heartbeat.host} the longest: at {heartbeat.at}, {waits}"
            )
            return Verdict(coord, heartbeat, message, f"waits {waits}")
        return None


class Watchdog:
    """A context in which a thread watches an attempt's workers, and notes in the run's folder what they do."""

    def __init__(
        self, attempt: Attempt, experiment: Experiment, plan: RunPlan, on_first_step: FirstStepHook = None
    ) -> None:
        """``on_first_step`` is called with the attempt's first step when it has finished it."""
        pipeline = experiment.pipeline
        self.coords = [plan.coord(rank, pipeline) for rank in range(attempt.workers)]
        self._steps = experiment.train.steps
        self._attempt, self._plan, self._micro_batches = attempt, plan, pipeline.micro_batches
        self.heartbeats: dict[int, Heartbeat] = {}
        """The latest of each worker, by rank."""
        self.verdict: Verdict | None = None
        """Once there is one, the launcher ends the attempt."""
        self.verdict_time: float | None = None
        """Seconds since 1970."""
        self.ends_early = threading.Event()
        """Set to let the workers save after the step that they are in, and end."""
        self.paused = False
        """While true, there is no verdict: workers are still being placed, or no heartbeat can arrive."""
        self._on_first_step = on_first_step
        self._detector = StallDetector(self.coords)
        self._checked_at = self._note_due = 0.0
        """Times of the last check, and of the next note; monotonic clock."""
        self.folder = Path()
        """Where workers of this machine write their heartbeats, while it watches."""
        self._received: dict[int, bytes] = {}
        """Those of workers elsewhere, by rank."""
        self._thread = PeriodicThread(self._check_heartbeats, PERIOD_S, "watch", self._log_failure)

    def __enter__(self) -> Watchdog:
        self._temporary = TemporaryDirectory(prefix="gpipe-heartbeats-", ignore_cleanup_errors=True)
        self.folder = Path(self._temporary.name)
        self._checked_at = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._thread.end()
        self.read_heartbeats()
        self._note_heartbeats()
        self._temporary.cleanup()

    def stall_report(self) -> str:
        """Returns where each stage was last seen."""
        remarks = {self.verdict.coord.rank: f"the root cause: {self.verdict.short}"} if self.verdict else {}
        return stall_report(self._plan.schedule_config, self.coords, self._micro_batches, self.heartbeats, remarks)

    def receive(self, heartbeats: Mapping[int, bytes]) -> None:
        """Takes the files of workers elsewhere, by rank."""
        self._received |= heartbeats

    def read_heartbeats(self) -> None:
        attempt = self._attempt.number
        for coord in self.coords:
            if (received := self._received.get(coord.rank)) is not None:
                heartbeat = parse_heartbeat(received, attempt)
            else:
                heartbeat = read_heartbeat(self.folder, coord.replica, coord.stage, attempt)
            if heartbeat is not None:
                self.heartbeats[coord.rank] = heartbeat
        if self._on_first_step is not None and any(heartbeat.steps_done for heartbeat in self.heartbeats.values()):
            on_first_step, self._on_first_step = self._on_first_step, None
            on_first_step(self.first_step or 0)

    def _note_heartbeats(self) -> None:
        """Writes the heartbeats to the run's folder; where that is slow, once a second."""
        if not self.heartbeats:
            return
        start = time.monotonic()
        with suppress(OSError):  # a full disk, which the run survives
            write_heartbeats(self._attempt.run.heartbeats, self.heartbeats.values())
        self._note_due = time.monotonic() + min(1.0, 9 * (time.monotonic() - start))

    @property
    def first_step(self) -> int | None:
        """The attempt's first step; None until a worker has reported it."""
        steps = [heartbeat.first_step for heartbeat in self.heartbeats.values() if heartbeat.first_step is not None]
        return max(steps, default=None)

    @property
    def last_step(self) -> int | None:
        """The last step that a worker has reported as done."""
        steps = [
            heartbeat.first_step + heartbeat.steps_done
            for heartbeat in list(self.heartbeats.values())
            if heartbeat.first_step is not None
        ]
        return max(steps, default=None)

    def trains(self) -> bool:
        """Whether steps are being done now: this attempt has done one, and not the last."""
        has_begun = any(heartbeat.steps_done for heartbeat in list(self.heartbeats.values()))
        return has_begun and (self.last_step or 0) < self._steps

    @property
    def should_stop(self) -> bool:
        """Whether the launcher must end the attempt. Raises WorkerError if the watchdog's thread has died."""
        if self._thread.died:
            raise WorkerError("the watchdog's thread has died, so stalls would not be detected")
        return self.verdict is not None

    def _log_failure(self, error: Exception) -> None:
        failure = f"reading the workers' heartbeats failed ({type(error).__name__}: {error})"
        log = run_logger(self._attempt.run.messages)
        log(f"{failure}; the run continues; the traceback is in {log_error(error)}")

    def _check_heartbeats(self) -> None:
        if self.verdict is not None:
            return
        self.read_heartbeats()
        if self.ends_early.is_set():
            with suppress(OSError):
                (self.folder / END_FILE).touch()
        if time.monotonic() >= self._note_due:
            self._note_heartbeats()
        before, self._checked_at = self._checked_at, time.monotonic()
        if self.paused:
            return
        # bounded, because time in which this process was suspended is not silence of the workers
        verdict = self._detector.update(self.heartbeats, min(self._checked_at - before, 4 * PERIOD_S))
        if verdict is not None:
            self.verdict_time, self.verdict = time.time(), verdict
