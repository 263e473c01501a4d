"""How far runs on a device were off their plans: a file of JSON lines for each device, a line for each run."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from suite.training.jsonl import read_lines

LAST = 100
"""The runs that count: a device's driver, its cooling and its neighbours change."""


def note(file: Path, planned_s: float, measured_s: float) -> None:
    """Adds a run: the step that was planned, and the median of its first ones. A full disk does not end a run."""
    with suppress(OSError), file.open("a") as lines:
        # a line of its own, even after one that a crash cut off
        lines.write("\n" + json.dumps({"planned_s": planned_s, "measured_s": measured_s}) + "\n")


def ratios(file: Path) -> tuple[float, ...]:
    """Returns measured over planned steps of the latest runs; empty before the first."""
    found = []
    with suppress(OSError):  # a plan does without
        for run in read_lines(file):
            with suppress(TypeError, KeyError, ZeroDivisionError):  # a damaged line
                found.append(run["measured_s"] / run["planned_s"])
    return tuple(found[-LAST:])
