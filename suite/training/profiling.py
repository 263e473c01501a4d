"""Records steps of each worker with torch.profiler, for Perfetto.

    runs/<name>/<id>/profile/stage-<replica>-<k>.json.gz     operators, and a span for each action: F3, B0

Beside it our own timeline (``trace``) has the actions of all workers in one picture, without operators.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import torch

from suite.errors import SettingError, shortened
from suite.pipeline.model.topology import RankCoord
from suite.pipeline.runtime.executor import Executor
from suite.settings import LoopSettings

EXPORT_TIMEOUT_S = 300.0
"""Longest start of the profiler, and longest writing of its trace."""


def profiled_steps(text: str, steps: int) -> range:
    """Returns the steps, counted from 0, that ``train.profile_steps`` names for a run of ``steps`` steps: 20 or 20-23,
    counted from 1. Raises SettingError when it is no such range, or not within the run."""
    match = re.fullmatch(r"(\d{1,18})(?:-(\d{1,18}))?", text.strip())
    if match is None:
        asked = shortened(text)
        raise SettingError(f"train.profile_steps is {asked!r}; give a step or a range of steps, such as 20 or 20-23")
    first, last = int(match[1]), int(match[2] or match[1])
    if not 1 <= first <= last <= steps:
        raise SettingError(
            f"train.profile_steps is {text}, the run has steps 1 to {steps}; give a range within them, first step first"
        )
    return range(first - 1, last)


def step_profiler(settings: LoopSettings, folder: Path, coord: RankCoord, device: torch.device) -> StepProfiler | None:
    """Returns the profiler of a worker, whose trace goes to ``folder``; None if no steps are profiled."""
    if settings.profile_steps is None:
        return None
    return StepProfiler(folder, coord, profiled_steps(settings.profile_steps, settings.steps), device)


class StepProfiler:
    """Profiles one worker's steps of a range."""

    def __init__(self, folder: Path, coord: RankCoord, steps: range, device: torch.device) -> None:
        self._path, self._steps = folder / f"stage-{coord.replica}-{coord.stage}.json.gz", steps
        activity = torch.profiler.ProfilerActivity
        self._activities = {activity.CPU, getattr(activity, device.type.upper())}
        self._profile: Any = None

    def begin(self, step: int, executor: Executor) -> None:
        """Starts the profiler if ``step`` is in the range; a run that resumes may begin in its middle."""
        if step not in self._steps or self._profile is not None:
            return
        executor.status.begin("profile", step)
        with executor.status.allow(EXPORT_TIMEOUT_S):
            self._profile = torch.profiler.profile(activities=self._activities)
            self._profile.start()
        executor.profiling = True

    def end(self, step: int | None, executor: Executor) -> None:
        """Writes the trace after the last step of the range, or without ``step`` the part until the run ended early."""
        if self._profile is None or (step is not None and step + 1 in self._steps):
            return
        executor.profiling = False
        executor.status.begin("profile", step)
        with executor.status.allow(EXPORT_TIMEOUT_S):
            self._profile.stop()
            try:
                self._path.parent.mkdir(exist_ok=True)
                self._profile.export_chrome_trace(str(self._path))
            except OSError as error:  # such as a full disk, which must not end the training
                print(f"the profile {self._path} could not be written: {error}", file=sys.stderr)
        self._profile = None
