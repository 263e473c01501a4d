"""Watches the workers of one attempt by their signs of life, and says which of them holds up all others.

    silent      no beat for its patience while others beat: stopped, or its machine hangs
    stuck       beats, waits for nobody, and its turn does not end: an endless layer
    a circle    all beat, all wait: a message was lost

Whoever waits for another is never named before the one it waits for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType

from experiments.experiment import Experiment
from launch.beats import ENDED, Beat, read_beat
from launch.error_log import log_error
from launch.grid import grid
from launch.worker import Job, speaker
from suite.errors import WorkerError
from suite.pipeline.topology import Place
from suite.training.recurring import Recurring

PERIOD = 0.25

FIRST_BEAT_S = 300.0
"""Seconds from an attempt's start to each worker's first sign of life: placement, imports, the first meeting."""

START_SILENCE_S = 30.0
"""Seconds that a worker may be silent before its first step: it imports and compiles."""

END_S = 60.0
"""Seconds after the last worker was done, or failed, in which its launcher is to come back."""

FRESH_S = 2.5
"""Who was heard so lately is alive: two beats and a half."""


@dataclass(frozen=True)
class Verdict:
    """Who holds up an attempt, and why."""

    place: Place
    beat: Beat | None
    """Its last; None where it was never heard."""
    told: str
    """A sentence for a person."""
    short: str
    """A few words for a picture."""


class Judge:
    """Decides from what is seen. Knows no clock and no file, so it can be asked about any course of events."""

    def __init__(self, places: Sequence[Place]) -> None:
        self._places = places
        self._numbers: dict[int, int] = dict.fromkeys((place.rank for place in places), 0)
        self._quiet: dict[int, float] = dict.fromkeys(self._numbers, 0.0)

    def see(self, beats: Mapping[int, Beat], elapsed: float) -> Verdict | None:
        """Takes the workers' last beats by rank, ``elapsed`` seconds after those before; returns who is to blame."""
        for place in self._places:
            beat = beats.get(place.rank)
            if beat is not None and beat.number != self._numbers[place.rank]:
                self._numbers[place.rank], self._quiet[place.rank] = beat.number, 0.0
            else:
                self._quiet[place.rank] += elapsed
        working = [place for place in self._places if not _ended(beats.get(place.rank))]
        if not working:
            return self._unended(beats)
        return self._silent(working, beats) or self._stuck(working, beats)

    def _unended(self, beats: Mapping[int, Beat]) -> Verdict | None:
        place = min(self._places, key=lambda place: self._quiet[place.rank])
        if (quiet := self._quiet[place.rank]) <= END_S:
            return None
        told = f"all workers came to their end, and {quiet:.0f} s later their processes have not"
        return Verdict(place, beats[place.rank], told, "its process does not end")

    def _silent(self, working: Sequence[Place], beats: Mapping[int, Beat]) -> Verdict | None:
        alone = len(self._places) == 1
        for place in sorted(working, key=lambda place: -self._quiet[place.rank]):
            beat, quiet = beats.get(place.rank), self._quiet[place.rank]
            if beat is None:
                if quiet > FIRST_BEAT_S:
                    mute = sum(other.rank not in beats for other in working)
                    among = f" ({mute} of {len(self._places)} workers gave none)" if mute > 1 else ""
                    told = f"{place} gave no sign of life in the first {quiet:.0f} s{among}"
                    return Verdict(place, None, told, "never heard")
                continue
            allowed = START_SILENCE_S if beat.steps == 0 else beat.usual_s
            # all at once are rather the folder's silence, or this machine's, than theirs
            others = alone or any(self._quiet[other.rank] < FRESH_S for other in self._places if other != place)
            if quiet > (allowed if others else 3 * allowed):
                told = f"{place} on {beat.host} has not answered for {quiet:.0f} s, last seen at {beat.at}"
                return Verdict(place, beat, told, f"no sign of life for {quiet:.0f} s")
        return None

    def _stuck(self, working: Sequence[Place], beats: Mapping[int, Beat]) -> Verdict | None:
        heard = [(place, beats[place.rank]) for place in working if place.rank in beats]
        late = [(place, beat) for place, beat in heard if beat.since_s > beat.patience_s]
        late.sort(key=lambda one: -one[1].since_s)
        for place, beat in late:
            if not beat.waiting:
                told = f"{place} on {beat.host} has been at {beat.at} for {beat.since_s:.0f} s"
                told += f", more than the {beat.patience_s:.0f} s that one action may take"
                layer = f" in layer {beat.layer}" if beat.layer is not None else ""
                return Verdict(place, beat, told, f"stuck{layer} for {beat.since_s:.0f} s")
        if late and len(late) == len(working):
            place, beat = late[0]
            waits = f"{beat.since_s:.0f} s for {beat.waiting}"
            told = f"all workers wait for one another, {place} on {beat.host} the longest: at {beat.at}, {waits}"
            return Verdict(place, beat, told, f"waits {waits}")
        return None


def _ended(beat: Beat | None) -> bool:
    return beat is not None and beat.what in ENDED


class Watch:
    """A context in which an attempt's workers are watched, from a thread of its own."""

    def __init__(self, job: Job, experiment: Experiment, stepped: Callable[[], None] = lambda: None) -> None:
        """``stepped`` hears of the attempt's first step."""
        pipeline = experiment.pipeline
        count = pipeline.stages * pipeline.replicas
        self.places = [Place(rank, pipeline.stages, pipeline.replicas) for rank in range(count)]
        self._job, self._micro_batches = job, pipeline.micro_batches
        self.beats: dict[int, Beat] = {}
        """The last of each worker, by rank."""
        self.verdict: Verdict | None = None
        """Once there is one, the launcher ends the attempt."""
        self.named: float | None = None
        """The time of day at which it fell."""
        self.held = False
        """While it is, nobody is judged: workers are still to be placed."""
        self._stepped: Callable[[], None] | None = stepped
        self._judge = Judge(self.places)
        self._seen = 0.0
        """When the judge saw the beats last, on this machine's clock."""
        self._recurring = Recurring(self._judge_beats, PERIOD, "watch", self._failed)

    def __enter__(self) -> Watch:
        self._seen = time.monotonic()
        self._recurring.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._recurring.end()
        with suppress(OSError):  # of the storage
            self.look()

    def grid(self) -> str:
        """Returns where each stage was last seen."""
        blamed = {self.verdict.place.rank: f"the first cause: {self.verdict.short}"} if self.verdict else {}
        return grid(self._job.recipe, self.places, self._micro_batches, self.beats, blamed)

    def look(self) -> None:
        """Reads the workers' beats."""
        for place in self.places:
            beat = read_beat(self._job.run.beats, place.replica, place.stage, self._job.attempt)
            if beat is not None:
                self.beats[place.rank] = beat
        if self._stepped is not None and any(beat.steps for beat in self.beats.values()):
            stepped, self._stepped = self._stepped, None
            stepped()

    @property
    def began_with(self) -> int | None:
        """The step that the attempt began with, once a worker knew it."""
        return max((beat.start for beat in self.beats.values() if beat.start is not None), default=None)

    @property
    def reached(self) -> int | None:
        """Steps done, as far as was heard."""
        return max((beat.start + beat.steps for beat in self.beats.values() if beat.start is not None), default=None)

    @property
    def ends(self) -> bool:
        """Whether the launcher is to end the attempt. Raises WorkerError where nobody watches any more."""
        if self._recurring.died:
            raise WorkerError("the thread that watched the workers is gone, and a stall would not be seen any more")
        return self.verdict is not None

    def _failed(self, error: Exception) -> None:
        told = f"looking at the workers' signs of life failed ({type(error).__name__}: {error})"
        speaker(self._job.run.messages)(f"{told}; it goes on; the traceback is in {log_error(error)}")

    def _judge_beats(self) -> None:
        if self.verdict is not None:
            return
        self.look()
        before, self._seen = self._seen, time.monotonic()
        if self.held:
            return
        # time in which this process itself did not run is no silence of others
        verdict = self._judge.see(self.beats, min(self._seen - before, 4 * PERIOD))
        if verdict is not None:
            self.named, self.verdict = time.time(), verdict
