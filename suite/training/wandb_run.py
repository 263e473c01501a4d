"""A run's wandb run: what it is called, who opens it, and what goes there while the run trains.

    runs/<name>/<id>/wandb.json                 project, name, group, tags and id: the next writer goes on with these
                     wandb/offline-run-*-<id>/  a part for each time it was opened; wandb adds them to one run

One process writes at a time. Every part is opened to be resumed, so an upload appends it to those before it.
"""

from __future__ import annotations

import json
import netrc
import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from suite.settings import TrackingSettings
from suite.training.trackers import Values

PUBLIC = "https://api.wandb.ai"
"""Where wandb sends to unless WANDB_BASE_URL says otherwise."""

OPENING_S, FINISH_S = 20, 60
"""Seconds that a server has to open a run, and to take what is left at its end."""


@dataclass(frozen=True)
class Identity:
    """What a wandb run is called."""

    project: str
    name: str
    group: str | None
    """The sweep that the run is one of."""
    tags: tuple[str, ...]
    id: str | None = None
    """None for one that was never opened."""

    @staticmethod
    def of(folder: Path) -> Identity | None:
        """Returns what a run's folder says; None where it says nothing, or nothing that can be read."""
        try:
            values = json.loads((folder / "wandb.json").read_text())
            return Identity(**values | {"tags": tuple(values["tags"])})
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def keep(self, folder: Path) -> None:
        """Writes it into a run's folder, whole or not at all."""
        draft = folder / "wandb.json.draft"
        draft.write_text(json.dumps(asdict(self), indent=1) + "\n")
        draft.rename(folder / "wandb.json")


def has_key(server: str) -> bool:
    """Returns whether there is a key for a server: in WANDB_API_KEY, or in the file that ``wandb login`` writes."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    path = Path(os.environ.get("NETRC") or Path.home() / ".netrc")
    try:
        return netrc.netrc(path).authenticators(urlsplit(server).hostname or "") is not None
    except (OSError, ValueError, netrc.NetrcParseError):
        return False


def wandb_mode(settings: TrackingSettings) -> str:
    """Returns the mode in force: what is set, or for ``auto`` what WANDB_MODE says, or online when there is a key."""
    if settings.wandb != "auto":
        return settings.wandb
    if mode := os.environ.get("WANDB_MODE"):
        return mode
    return "online" if has_key(os.environ.get("WANDB_BASE_URL") or PUBLIC) else "offline"


def open_run(folder: Path, mode: str, identity: Identity, config: dict[str, Any] | None = None) -> Any:
    """Opens a run, or another part of it, and returns wandb's object. Raises whatever wandb raises."""
    import wandb

    # wandb's own process of a parent would still hold the run whose writer was killed
    os.environ.pop("WANDB_SERVICE", None)
    run = wandb.init(
        dir=str(folder), project=identity.project, name=identity.name, group=identity.group, job_type="train",
        tags=identity.tags, id=identity.id or secrets.token_hex(6), resume="allow", mode=mode, config=config,  # type: ignore[arg-type]
        settings=wandb.Settings(console="off", silent=True, init_timeout=OPENING_S, finish_timeout=FINISH_S),
    )  # fmt: skip
    # wandb's own counter drops what goes back after a resume
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    return run


class Wandb:
    """A wandb run in the run's folder. When wandb fails, training says so once and goes on without it."""

    def __init__(
        self, folder: Path, settings: TrackingSettings, identity: Identity, config: dict[str, Any],
        say: Callable[[str], None], beside: Callable[[], Values] = dict,
    ) -> None:  # fmt: skip
        """``beside`` gives what else there is to record with a step; it must not wait for anything."""
        self._run: Any = None
        self._say, self._beside, self._step = say, beside, 0
        mode = wandb_mode(settings)
        if mode == "disabled":
            return
        try:
            self._run = open_run(folder, mode, identity, config)
            replace(identity, id=self.run_id).keep(folder)
        except Exception as error:
            self._lose(error)

    @property
    def run_id(self) -> str | None:
        """The id under which the run can be taken up again; None without wandb."""
        return None if self._run is None else str(self._run.id)

    def log(self, step: int, values: Values) -> None:
        """Sends one step's numbers."""
        self._step = step
        self._try(lambda run: run.log({"step": step, **values, **self._beside()}))

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Sends what is left, writes the summary and closes the run."""
        if left := self._beside():
            self._try(lambda run: run.log({"step": self._step, **left}))
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
