"""The wandb run of a run: its identity, how it is opened, and what is logged to it.

    runs/<name>/<id>/wandb.json                 project, name, group, tags and id, for the next writer
                     wandb/offline-run-*-<id>/  one part each time it was opened; wandb adds them to one run

One process writes at a time. Every part is opened with resume, so an upload appends it to the parts before it.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from suite.log import Log
from suite.paths import hide_secrets, write_atomically
from suite.settings import TrackingSettings
from suite.training.metrics import NAMESPACES, STEP
from suite.training.trackers import Values

PUBLIC = "https://api.wandb.ai"
"""wandb's server unless WANDB_BASE_URL is set."""


@dataclass(frozen=True)
class Identity:
    """The names and id of a wandb run."""

    project: str
    name: str
    group: str | None
    """The sweep that the run belongs to."""
    tags: tuple[str, ...]
    id: str | None = None
    """None until the run is first opened."""

    @staticmethod
    def read(folder: Path) -> Identity | None:
        """Reads the identity from a run's folder; None if it is missing or unreadable."""
        try:
            values = json.loads((folder / "wandb.json").read_text())
            return Identity(**values | {"tags": tuple(values["tags"])})
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def write(self, folder: Path) -> None:
        write_atomically(folder / "wandb.json", json.dumps(asdict(self), indent=1) + "\n")


def has_key(server: str) -> bool:
    """Returns whether a server has an API key: in WANDB_API_KEY, or in the file that ``wandb login`` writes."""
    from requests.utils import get_netrc_auth

    return bool(os.environ.get("WANDB_API_KEY") or get_netrc_auth(server))


def wandb_mode(settings: TrackingSettings) -> str:
    """Returns the mode: the setting, or for ``auto`` WANDB_MODE, or online if there is an API key, else offline."""
    if settings.wandb != "auto":
        return settings.wandb
    if mode := os.environ.get("WANDB_MODE"):
        return mode
    return "online" if has_key(os.environ.get("WANDB_BASE_URL") or PUBLIC) else "offline"


def open_run(folder: Path, mode: str, identity: Identity, config: dict[str, Any] | None = None) -> Any:
    """Opens a run, or a further part of it, and returns wandb's object. Raises whatever wandb raises."""
    import wandb

    # an inherited wandb service process may still hold the run whose writer was killed
    os.environ.pop("WANDB_SERVICE", None)
    sys.argv[1:] = map(hide_secrets, sys.argv[1:])  # wandb records them
    # at most 20 s for the server to open the run, and 60 s to receive the remaining data at its end
    run = wandb.init(
        dir=str(folder), project=identity.project, name=identity.name, group=identity.group, job_type="train",
        tags=identity.tags, id=identity.id or secrets.token_hex(6), resume="allow", mode=mode, config=config,  # type: ignore[arg-type]
        settings=wandb.Settings(console="off", silent=True, init_timeout=20, finish_timeout=60),
    )  # fmt: skip
    # wandb's own counter drops steps that repeat after a resume
    run.define_metric(STEP)
    for namespace in NAMESPACES:
        run.define_metric(f"{namespace}/*", step_metric=STEP)
    return run


class Wandb:
    """A wandb run in the run's folder. If wandb fails, this is logged once and training continues without it."""

    def __init__(
        self,
        folder: Path,
        settings: TrackingSettings,
        identity: Identity,
        config: dict[str, Any],
        log: Log,
        extra: Callable[[], Values] = dict,
    ) -> None:
        """``extra`` returns further metrics to log with a step. It must not block."""
        self._run: Any = None
        self._log, self._extra, self._step = log, extra, 0
        mode = wandb_mode(settings)
        if mode == "disabled":
            return
        try:
            self._run = open_run(folder, mode, identity, config)
            replace(identity, id=self.run_id).write(folder)
        except Exception as error:
            self._disable(error)

    @property
    def run_id(self) -> str | None:
        """The id to resume the run with; None without wandb."""
        return None if self._run is None else str(self._run.id)

    def log(self, step: int, values: Values) -> None:
        self._step = step
        self._try(lambda run: run.log({STEP: step, **values, **self._extra()}))

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Logs the remaining metrics, writes the summary and closes the run."""
        if remaining := self._extra():
            self._try(lambda run: run.log({STEP: self._step, **remaining}))
        self._try(lambda run: (run.summary.update(dict(summary)), run.finish()))

    def _try(self, action: Callable[[Any], Any]) -> None:
        if self._run is None:
            return
        try:
            action(self._run)
        except Exception as error:
            self._disable(error)

    def _disable(self, error: Exception) -> None:
        self._run = None
        self._log(f"wandb failed ({error}); training continues, the metrics are in metrics.jsonl")
