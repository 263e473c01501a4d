"""An attempt: where a run trains, and from when."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from launch.runs.store import RunFolder
from suite.cgroups import cpu_limit


@dataclass(frozen=True)
class Attempt:
    """Where and from when a run trains. What is trained, and how, its workers read from the run's folder."""

    folder: Path
    data: Path
    """The prepared data."""
    workers: int
    use_gpu: bool = False
    resume: bool = False
    number: int = 1
    """Counted across resumes of the run."""
    checkpoint_step: int | None = None
    """Step of the checkpoint to resume from; later ones are abandoned. None: the newest valid one."""
    on_fewer_devices: bool = False
    """Whether the run has fewer devices than requested."""
    owner: str = ""
    """The driver, by a text that no other has (``suite.training.checkpoint.ownership``)."""
    working_dir: Path | None = None
    """The folder that the command was started in, for a file of a user's that reads relative paths; None for a job,
    whose workers start in the job's own."""
    is_brief: bool = False
    """Whether its few steps are only compared: nothing is evaluated, and no checkpoint made for the last step."""
    costs: Path | None = None
    """The folder of measured costs, which has the device's measured peak too."""
    heartbeats: Path | None = None
    """The folder for its heartbeat, on the worker's machine; None if nobody watches."""
    local_workers: int | None = None
    """Those on this worker's machine; None: all."""
    hook: str = ""
    """``path.py:function[argument]`` of GPIPE_WORKER_HOOK, called before a worker is assembled; tests inject faults."""

    @property
    def run(self) -> RunFolder:
        return RunFolder(self.folder)

    @property
    def cores(self) -> int:
        """A worker's equal share of its machine's cores, at least one."""
        return max(1, cpu_limit() // (self.local_workers or self.workers))

    @property
    def owner_of_attempt(self) -> str:
        """Who writes the checkpoints of this attempt."""
        return f"{self.owner}, attempt {self.number}"

    @property
    def input_files(self) -> tuple[Path, Path]:
        """The files of the experiment and of the plan: on fewer devices than requested, those of that plan; while a
        resumed run starts, their drafts."""
        if self.on_fewer_devices:
            return self.run.fewer_devices, self.run.fewer_devices_plan
        return _newest(self.run.experiment), _newest(self.run.plan_json)


def draft_of(file: Path) -> Path:
    """Returns the draft of a run's experiment or plan; it replaces the file once the workers of a resumed run have
    started."""
    return file.with_suffix(".draft")


def _newest(file: Path) -> Path:
    draft = draft_of(file)
    return draft if draft.exists() else file


def run_logger(messages: Path) -> Callable[[str], None]:
    """Returns a function that logs to ``messages`` in the run's folder; the follower prints them to the terminal."""

    def log(text: str) -> None:
        try:
            with messages.open("a") as file:
                file.write(f"{time.strftime('%H:%M:%S')} {text}\n")
        except OSError as error:  # a full disk must not end the run because of a log line
            with suppress(OSError):
                print(f"{text} ({error})", file=sys.stderr, flush=True)

    return log
