"""Shows a run's progress: follows the files that its workers write, and shows step, loss, speed and time left."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments.base.experiment import Experiment
from launch.error_log import log_error
from launch.runs.store import RunFolder
from launch.tracking.progress import Bar
from launch.tracking.step_line import figures, validation_line
from suite.training.jsonl import parsed
from suite.training.metrics import STEP, STEP_S, is_step
from suite.training.periodic import PeriodicThread

_ABOUT_STEP = re.compile(r"[\d:]+ step \d+: ")


class LogTail:
    """Reads the complete lines added to a file since the last call; the file need not exist yet."""

    def __init__(self, path: Path, from_end: bool = False) -> None:
        self._path = path
        self._at = path.stat().st_size if from_end and path.exists() else 0
        self.rewritten = False
        """Whether the last call found the file rewritten, and so returned lines of before."""

    def values(self) -> Iterator[dict[str, Any]]:
        """Yields the objects of new lines of JSON, without parts of lines, as when the file was just rewritten."""
        for line in self.lines():
            if (values := parsed(line)) is not None:
                yield values

    def lines(self) -> Iterator[str]:
        """Yields new lines, without an incomplete last line."""
        if not self._path.exists():
            return
        size = self._path.stat().st_size
        self.rewritten = size < self._at
        if self.rewritten:  # by a resumed run
            self._at = 0
        with self._path.open("rb") as file:
            file.seek(self._at)
            for raw in file:
                if not raw.endswith(b"\n"):
                    break
                self._at += len(raw)
                yield raw.decode(errors="replace").rstrip("\n")


class Follower:
    """A context in which a thread shows a run's progress."""

    def __init__(
        self,
        run: RunFolder,
        experiment: Experiment,
        console: Console,
        on_step: Callable[[int, float], None] = lambda step, seconds: None,
    ) -> None:
        """``on_step`` receives each step and its seconds."""
        self._train, self._unit = experiment.train, experiment.unit
        self._console, self._on_step = console, on_step
        self._validation_s = 0.0
        # from the end, because a resumed run has lines already, and rewrites them while it starts
        self._metrics, self._messages = LogTail(run.metrics, from_end=True), LogTail(run.messages, from_end=True)
        self._thread = PeriodicThread(self._poll, 0.5, "follow", log_error)
        steps = experiment.train.steps
        self._view = Bar(console, steps, experiment.train.log_every or max(1, steps // 10))
        self._mean_step_s: float | None = None

    def __enter__(self) -> Follower:
        self._view.start()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.end()
        self._thread.call()
        self._view.stop()

    def _poll(self) -> None:
        messages = list(self._messages.lines())
        about_steps = [line for line in messages if _ABOUT_STEP.match(line)]  # shown after the new steps
        for line in messages:
            if line not in about_steps:
                self._console.print(line)
        last: dict[str, Any] | None = None
        for values in self._metrics.values():
            if is_step(values):
                self._on_step(int(values[STEP]), float(values[STEP_S]))
                last = values
                if not self._metrics.rewritten:
                    self._show(values)  # each one, because the view chooses which steps it prints
            elif text := validation_line(values):
                self._validation_s = float(values.get("valid/seconds", 0.0))
                if not self._metrics.rewritten:
                    self._console.print(text)
        if last is not None and self._metrics.rewritten:
            self._show(last)
        for line in about_steps:
            self._console.print(line)

    def _show(self, values: dict[str, Any]) -> None:
        seconds = float(values[STEP_S])
        self._mean_step_s = seconds if self._mean_step_s is None else 0.8 * self._mean_step_s + 0.2 * seconds
        step, steps = int(values[STEP]), self._train.steps
        every = self._train.validate_every or steps
        validations = -(-steps // every) - step // every  # one at each multiple of the interval, and one at the end
        self._view.show(step, figures(values, steps, self._unit, self._mean_step_s, self._validation_s * validations))
