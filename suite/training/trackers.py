"""Where the numbers of a run go: JSON lines in its folder, always, and wandb.

One worker writes, the one that holds the loss. Every record carries our own ``step``, the count of steps done; wandb's
own counter drops what goes back after a resume, so it is told to plot against ours.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from suite.settings import TrackingSettings
from suite.training.lines import reopened

Values = Mapping[str, float]


class Tracker(Protocol):
    """Takes a run's numbers as they come."""

    def log(self, step: int, values: Values) -> None:
        """Records the numbers of one step."""

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Records the end of the run."""


class JsonLines:
    """``metrics.jsonl``: a line a step. Lines after the step a run resumes from are dropped when it opens."""

    def __init__(self, path: Path, start: int) -> None:
        self._file = reopened(path, start)

    def log(self, step: int, values: Values) -> None:
        """Appends one line, at once visible to whoever follows the file; JSON knows no NaN, so that becomes null."""
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._file.write({"step": step, **finite})

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Closes the file; the summary is ``record.json``'s business."""
        self._file.close()


def wandb_mode(settings: TrackingSettings) -> str:
    """Returns the mode in force: what is set, or for ``auto`` what WANDB_MODE says, or online when there is a key."""
    if settings.wandb != "auto":
        return settings.wandb
    if mode := os.environ.get("WANDB_MODE"):
        return mode
    netrc = Path.home() / ".netrc"
    has_key = bool(os.environ.get("WANDB_API_KEY")) or (netrc.exists() and "api.wandb.ai" in netrc.read_text())
    return "online" if has_key else "offline"


class Wandb:
    """A wandb run in the run's folder. When wandb fails, training says so once and goes on without it."""

    def __init__(
        self, folder: Path, settings: TrackingSettings, name: str, config: dict[str, Any], run_id: str | None,
        say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._run: Any = None
        self._say = say
        mode = wandb_mode(settings)
        if mode == "disabled":
            return
        try:
            import wandb

            self._run = wandb.init(
                dir=str(folder), project=settings.project, name=name, id=run_id, resume="allow" if run_id else None,
                mode=mode, config=config,  # type: ignore[arg-type]
                settings=wandb.Settings(console="off", silent=True, init_timeout=20, finish_timeout=60),
            )  # fmt: skip
            self._run.define_metric("step")
            self._run.define_metric("*", step_metric="step")
        except Exception as error:
            self._lose(error)

    @property
    def run_id(self) -> str | None:
        """The id under which the run can be taken up again; None without wandb."""
        return None if self._run is None else str(self._run.id)

    def log(self, step: int, values: Values) -> None:
        """Sends one step's numbers."""
        self._try(lambda run: run.log({"step": step, **values}))

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Writes the summary and closes the run."""
        self._try(lambda run: (run.summary.update(dict(summary)), run.finish()))

    def _try(self, what: Callable[[Any], Any]) -> None:
        if self._run is None:
            return
        try:
            what(self._run)
        except Exception as error:
            self._lose(error)

    def _lose(self, error: Exception) -> None:
        self._run = None
        self._say(f"wandb failed ({error}); training goes on, its numbers are in metrics.jsonl")
