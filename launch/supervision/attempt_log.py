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

    def begin(self, experiment: Experiment) -> int:
        """Records the start of an attempt; returns its number."""
        self._last += 1
        pipeline, number = experiment.pipeline, self._last
        shape = {"K": pipeline.stages, "R": pipeline.replicas, "M": pipeline.micro_batches}
        self._append({"attempt": number, "began": _now(), **shape})
        return number

    def end(self, number: int, watchdog: Watchdog, outcome: str, cause: Cause | None = None) -> None:
        """Records the end of an attempt: first and last step, ``outcome``, root cause, and the time of the watchdog's
        verdict if it has one."""
        fields: dict[str, Any] = {
            "start": watchdog.first_step,
            "reached": watchdog.last_step,
            "named": watchdog.verdict_time,
        }
        fields |= asdict(cause) if cause else {}
        if cause is not None and cause.step is not None:
            fields["step"] = cause.step + 1  # a person reads it
        known = {name: value for name, value in fields.items() if value not in (None, "")}
        self._append({"attempt": number, "ended": _now(), "outcome": outcome, **known})

    def recovered(self, number: int, seconds: float) -> None:
        """Records the time from the previous failure to an attempt's first step."""
        self._append({"attempt": number, "recovered_s": round(seconds, 3)})

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
