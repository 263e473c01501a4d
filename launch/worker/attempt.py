"""An attempt: where a run trains, from when, and with which plan. Its workers get it, and read the rest from the run's
folder."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from experiments.base.experiment import Experiment
from experiments.registry import read_experiment_file
from launch.runs.store import RunFolder
from launch.worker.cgroups import cpu_limit
from launch.worker.distributed import GROUP_TIMEOUT_S
from models.chunked_loss import CPU_LOGITS_BYTES
from suite.pipeline.planning.flops import StepFlops
from suite.pipeline.schedule.config import ScheduleConfig
from suite.training.loop import DEADLINE_STEPS


@dataclass(frozen=True)
class AttemptSpec:
    """A worker's arguments; everything else is in the run's folder."""

    folder: Path
    data: Path
    cells: tuple[int, ...]
    """Layers of each cell, as planned."""
    schedule_config: ScheduleConfig
    """The planned schedule."""
    use_gpu: bool
    resume: bool
    attempt: int = 1
    """Counted across resumes of the run."""
    fault_plan: str = ""
    """Faults to inject in tests (``suite.pipeline.runtime.fault_injection``)."""
    step_s: float = 0.0
    """Planned duration of a step."""
    shrunk: bool = False
    """Whether the run has fewer devices than requested."""
    flops: StepFlops | None = None
    """Planned operations; None if the model has none, or if they could not be counted."""
    costs: Path | None = None
    """The folder of measured costs, which has the device's measured peak too."""
    logits_bytes: int = CPU_LOGITS_BYTES
    """The size of logits that the plan's devices compute at once (``models.chunked_loss``)."""
    checkpoint_step: int | None = None
    """Step of the checkpoint to resume from; later ones are abandoned. None: the newest valid one."""
    owner: str = ""
    """The driver, by a text that no other has (``suite.training.checkpoint.ownership``)."""
    working_dir: Path | None = None
    """The folder that the command was started in, for a file of a user's that reads relative paths; None for a job,
    whose workers start in the job's own."""
    heartbeats: Path | None = None
    """The folder for its heartbeat, on the worker's machine; None if nobody watches."""

    @property
    def run(self) -> RunFolder:
        """The run's folder."""
        return RunFolder(self.folder)

    @property
    def owner_of_attempt(self) -> str:
        """Who writes the checkpoints of this attempt."""
        return f"{self.owner}, attempt {self.attempt}"

    @property
    def timeout_s(self) -> float:
        """Limit for a wait, a collective or an action, as long as no step has been measured."""
        return max(GROUP_TIMEOUT_S, DEADLINE_STEPS * self.step_s)

    def experiment(self) -> Experiment:
        """The resolved experiment. While a resumed run starts, its draft; on fewer devices than requested, the shrunk
        experiment."""
        requested = self.draft if self.draft.exists() else self.run.experiment
        return read_experiment_file(self.run.shrunk if self.shrunk else requested)

    @property
    def draft(self) -> Path:
        """The new experiment of a resumed run; replaces the old one once the workers have started."""
        return self.run.experiment.with_suffix(".draft")


def threads_of(experiment: Experiment) -> int:
    """Returns the compute threads of a worker: as set, or an equal share of this machine's cores."""
    workers = experiment.pipeline.stages * experiment.pipeline.replicas
    return experiment.train.threads or max(1, cpu_limit() // workers)


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
