"""``attempts.jsonl``: when each attempt began and how it ended. If the driver is killed, the end is missing."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from experiments.base.experiment import Experiment
from launch.supervision.failure import Cause
from launch.supervision.watchdog import Watchdog
from suite.training.jsonl import read_lines


class AttemptLog:
    """Records a run's attempts, numbered across resumes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._last = max(read_attempt_lines(path), default=0)

    def begin(self, experiment: Experiment, planned_step_s: float = 0.0) -> int:
        """Records the start of an attempt; returns its number."""
        self._last += 1
        pipeline, self.began = experiment.pipeline, time.monotonic()
        shape = {"K": pipeline.stages, "R": pipeline.replicas, "M": pipeline.micro_batches}
        self._append({"attempt": self._last, "began": _now(), "planned_step_s": planned_step_s, **shape})
        return self._last

    def note(self, **figures: float) -> None:
        """Records figures: of an attempt if they include its number as ``attempt``, otherwise of the command."""
        self._append({name: round(value, 3) for name, value in figures.items()})

    def end(self, number: int, watchdog: Watchdog, outcome: str, cause: Cause | None = None) -> None:
        """Records the end of an attempt: first and last step, ``outcome``, root cause, and the time of the watchdog's
        verdict if it has one."""
        fields: dict[str, Any] = {"start": watchdog.first_step, "reached": watchdog.last_step}
        fields |= {"named": watchdog.verdict_time} | (asdict(cause) if cause else {})
        if cause is not None and cause.step is not None:
            fields["step"] = cause.step + 1  # a person reads it
        known = {name: value for name, value in fields.items() if value not in (None, "")}
        self._append({"attempt": number, "ended": _now(), "outcome": outcome, **known})

    def _append(self, line: dict[str, Any]) -> None:
        with suppress(OSError):  # a full disk must not end the supervised run
            torn = self._path.exists() and not self._path.read_bytes().endswith(b"\n")
            with self._path.open("a") as file:
                file.write("\n" * torn + json.dumps(line) + "\n")


def read_attempt_lines(path: Path) -> dict[int, dict[str, Any]]:
    """Returns the fields of each attempt by number, of all its lines together. A damaged line is left out, so an
    attempt may lack its start or its end."""
    merged: dict[int, dict[str, Any]] = {}
    for line in read_lines(path):
        if isinstance(line.get("attempt"), int):
            merged.setdefault(line["attempt"], {}).update(line)
    return dict(sorted(merged.items()))


def _now() -> float:
    return round(time.time(), 3)
