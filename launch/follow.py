"""The live face of a run: follows the files that its workers write and shows step, loss, speed and time left."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console

from experiments.planned import in_figures
from launch.error_log import log_error
from launch.progress import Update, face_of
from launch.runs import RunFolder
from suite.training.recurring import Recurring

PERIOD = 0.5


class Tail:
    """The whole lines that a file has gained since they were last asked for; the file need not exist yet."""

    def __init__(self, path: Path, from_end: bool = False) -> None:
        self._path = path
        self._at = path.stat().st_size if from_end and path.exists() else 0

    def lines(self) -> Iterator[str]:
        """Yields new lines; one still being written waits for the next call."""
        if not self._path.exists():
            return
        size = self._path.stat().st_size
        if size < self._at:  # rewritten by a resumed run
            self._at = 0
        with self._path.open("rb") as file:
            file.seek(self._at)
            for raw in file:
                if not raw.endswith(b"\n"):
                    break
                self._at += len(raw)
                yield raw.decode(errors="replace").rstrip("\n")


class Follower:
    """A context in which a run's progress is shown, from a thread of its own."""

    def __init__(
        self, run: RunFolder, steps: int, unit: str, console: Console,
        stepped: Callable[[int, float], None] = lambda step, seconds: None,
    ) -> None:  # fmt: skip
        """``stepped`` gets each step and its seconds."""
        self._steps, self._unit, self._stepped = steps, unit, stepped
        # a resumed run has lines already, and rewrites them while it starts
        self._metrics, self._messages = Tail(run.metrics, from_end=True), Tail(run.messages, from_end=True)
        self._recurring = Recurring(self._look, PERIOD, "follow", log_error)
        self._face = face_of(console)
        self._began = time.monotonic()
        self._pace: float | None = None

    def __enter__(self) -> Follower:
        self._face.start()
        self._face.show(Update(0, self._steps, "starting workers", 0.0))
        self._recurring.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._recurring.end()
        self._recurring.call()
        self._face.stop()

    def _look(self) -> None:
        for line in self._messages.lines():
            self._face.say(line)
        last: dict[str, Any] | None = None
        for line in self._metrics.lines():
            try:
                last = json.loads(line)
            except ValueError:  # the middle of a line of a file that was just rewritten
                continue
            self._stepped(int(last["step"]), float(last["seconds"]))
        if last is not None:
            self._show(last)

    def _show(self, values: dict[str, Any]) -> None:
        step, seconds = int(values["step"]), float(values["seconds"])
        self._pace = seconds if self._pace is None else 0.8 * self._pace + 0.2 * seconds
        loss = "not finite" if values["loss"] is None else f"{values['loss']:.3f}"
        left = (self._steps - step) * self._pace
        numbers = (
            f"loss {loss}  {in_figures(values[f'{self._unit}_per_second'])} {self._unit}/s  about {left:.0f} s left"
        )
        self._face.show(Update(step, self._steps, numbers, time.monotonic() - self._began))
