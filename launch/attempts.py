"""``attempts.jsonl``: when each attempt began and how it ended. One without an end: its driver was killed."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from experiments.experiment import Experiment
from launch.causes import Cause
from launch.watch import Watch
from suite.training.lines import read_lines


class Attempts:
    """A run's attempts, numbered over its whole life."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._last = max((int(line["attempt"]) for line in read_lines(path)), default=0)

    def begin(self, experiment: Experiment) -> int:
        """Notes that an attempt begins; returns its number."""
        self._last += 1
        pipeline, number = experiment.pipeline, self._last
        shape = {"K": pipeline.stages, "R": pipeline.replicas, "M": pipeline.micro_batches}
        self._note({"attempt": number, "began": _now(), **shape})
        return number

    def end(self, number: int, watch: Watch, outcome: str, cause: Cause | None = None) -> None:
        """Notes how one ended: the step that it began with, the last one seen, ``outcome`` and the first cause; when
        that was named, where the watch named it."""
        told: dict[str, Any] = {"start": watch.began_with, "reached": watch.reached, "named": watch.named}
        told |= asdict(cause) if cause else {}
        known = {name: value for name, value in told.items() if value not in (None, "")}
        self._note({"attempt": number, "ended": _now(), "outcome": outcome, **known})

    def recovered(self, number: int, seconds: float) -> None:
        """Notes how long after the failure before it an attempt had done its first step."""
        self._note({"attempt": number, "recovered_s": round(seconds, 3)})

    def _note(self, line: dict[str, Any]) -> None:
        with suppress(OSError):  # a full disk must not end the run that is supervised
            torn = self._path.exists() and not self._path.read_bytes().endswith(b"\n")
            with self._path.open("a") as file:
                file.write("\n" * torn + json.dumps(line) + "\n")


def _now() -> float:
    return round(time.time(), 3)
