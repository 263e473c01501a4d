"""``attempts.jsonl``: when each attempt began and how it ended. One without an end: its driver was killed."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from experiments.experiment import Experiment
from launch.causes import Cause
from suite.training.trackers import read_lines


class Attempts:
    """A run's attempts, numbered over its whole life."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def last(self) -> int:
        """Returns the number of the latest; 0 when there is none."""
        return max((int(line["attempt"]) for line in read_lines(self._path)), default=0)

    def begin(self, number: int, experiment: Experiment) -> None:
        """Notes that an attempt begins."""
        pipeline = experiment.pipeline
        shape = {"K": pipeline.stages, "R": pipeline.replicas, "M": pipeline.micro_batches}
        self._note({"attempt": number, "began": _now(), **shape})

    def end(self, number: int, start: int | None, step: int | None, outcome: str, cause: Cause | None = None) -> None:
        """Notes how one ended: the step that it began with, the last one seen, ``outcome`` and the first cause."""
        known = {name: value for name, value in (asdict(cause) if cause else {}).items() if value not in (None, "")}
        self._note({"attempt": number, "ended": _now(), "outcome": outcome, "start": start, "reached": step, **known})

    def recovered(self, number: int, seconds: float) -> None:
        """Notes how long after the failure before it an attempt had done its first step."""
        self._note({"attempt": number, "recovered_s": round(seconds, 3)})

    def _note(self, line: dict[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def _now() -> float:
    return round(time.time(), 3)
