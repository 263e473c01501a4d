"""A run's folder: ``runs/<name>/<id>/``, and what is where inside it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import filelock

from suite.errors import SettingError, nearest

STORAGE = os.environ.get("GPIPE_STORAGE", "")
"""The folder that all nodes of a cluster share, where a submitted run lies; none on one's own machine."""

JOB, COPIES = "GPIPE_JOB", "GPIPE_COPIES"
"""Environment variables of a submitted job: its name, and the URL that its runs are copied to, if there is one."""

SHARED_CACHE = "GPIPE_CACHE"
"""Environment variable of a submitted job: the cache of the machine it was submitted from, where all nodes see it."""

RUNS = Path(STORAGE) / "runs" if STORAGE else Path("runs")
CACHE = Path(os.environ.get(SHARED_CACHE) or (Path(STORAGE) / "cache" if STORAGE else ".cache"))


@dataclass(frozen=True)
class RunFolder:
    """The places of one run's files."""

    path: Path

    @property
    def experiment(self) -> Path:
        """The fully resolved experiment."""
        return self.path / "experiment.toml"

    @property
    def shrunk(self) -> Path:
        """What the experiment is while devices are missing."""
        return self.path / "shrunk.toml"

    @property
    def plan(self) -> Path:
        """Cells and sizes, as printed at the start."""
        return self.path / "plan.txt"

    @property
    def plan_record(self) -> Path:
        """The plan as one JSON object."""
        return self.path / "plan.json"

    @property
    def traces(self) -> Path:
        """A file of lines a worker: what it did when."""
        return self.path / "trace"

    @property
    def trace(self) -> Path:
        """All of them in one, for Perfetto."""
        return self.path / "trace.json"

    @property
    def timeline(self) -> Path:
        """The picture of one step, measured above simulated."""
        return self.path / "timeline.png"

    @property
    def metrics(self) -> Path:
        """A line a step."""
        return self.path / "metrics.jsonl"

    @property
    def spikes(self) -> Path:
        """A line for each step whose loss leapt."""
        return self.path / "spikes.jsonl"

    @property
    def layers(self) -> Path:
        """Each layer's gradient norm and kurtosis, a line every ``train.sharpness_every`` steps."""
        return self.path / "layers.jsonl"

    @property
    def record(self) -> Path:
        """The run in one record, written at its end."""
        return self.path / "record.json"

    @property
    def messages(self) -> Path:
        """What workers have to say to the person at the terminal."""
        return self.path / "messages.log"

    @property
    def attempts(self) -> Path:
        """Two lines an attempt: when it began, and how it ended."""
        return self.path / "attempts.jsonl"

    @property
    def beats(self) -> Path:
        """A file a worker: what it does now."""
        return self.path / "beats"

    @property
    def system(self) -> Path:
        """A file of lines a worker: processor, memory, waits."""
        return self.path / "system"

    @property
    def checkpoints(self) -> Path:
        """One folder a checkpoint."""
        return self.path / "checkpoints"

    @property
    def wandb_log(self) -> Path:
        """What wandb's own processes said once the workers had ended."""
        return self.path / "wandb" / "parts.log"

    def log(self, replica: int, stage: int) -> Path:
        """Standard output and error of one worker."""
        return self.path / "logs" / f"stage-{replica}-{stage}.log"


def new_run(name: str) -> RunFolder:
    """Makes the folder of a new run; its id is the time of day, and a number where that is taken."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for attempt in range(100):
        path = RUNS / name / (stamp if attempt == 0 else f"{stamp}-{attempt}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        (path / "logs").mkdir()
        return RunFolder(path.resolve())
    raise SettingError(f"no free folder below {RUNS / name} for {stamp}; wait a second and try again")


def named_run(name: str, id: str) -> Callable[[], RunFolder]:
    """Returns what makes the folder of a run whose id is given, as those of a sweep are."""

    def make() -> RunFolder:
        path = RUNS / name / id
        (path / "logs").mkdir(parents=True)
        return RunFolder(path.resolve())

    return make


@contextmanager
def held(run: Path, name: str = "lock") -> Iterator[None]:
    """A context in which no other process is at a run, or at what another lock of it is for. Raises SettingError when
    one is."""
    lock = filelock.FileLock(run / name)
    try:
        taken = lock.acquire(timeout=0)
    except filelock.Timeout:
        raise SettingError(f"another process is at run {run}; wait until it ends, or end it") from None
    with taken:
        note(run)
        yield


def job_notes(storage: Path, job: str) -> Path:
    """Returns where a job on a cluster notes the folders of its runs, a line each."""
    return storage / "jobs" / job


def note(run: Path) -> None:
    """Notes a run as one of this job's, if this is a job: ``make fetch`` brings what is noted."""
    if STORAGE and in_job():
        notes = job_notes(Path(STORAGE), os.environ[JOB])
        notes.parent.mkdir(parents=True, exist_ok=True)
        with notes.open("a") as file:
            file.write(f"{run.resolve()}\n")


def how_to_go_on(run: RunFolder) -> str:
    """Returns the command that takes a run up again, from where a person sits: of a submitted job that is elsewhere."""
    if in_job():
        return f"make submit RUN={run.path.parent.name}/{run.path.name} {where_jobs_go()}"
    return f"make resume RUN={run.path}"


def how_to_sync(run: RunFolder) -> str:
    """Returns the commands that upload what wandb recorded offline, from where a person sits."""
    if in_job():
        name = f"{run.path.parent.name}/{run.path.name}"
        return f"make fetch JOB={os.environ[JOB]} ADDRESS=, then make sync RUN={name}"
    return f"make sync RUN={run.path}"


def in_job() -> bool:
    """Whether this is a job that was submitted. Slurm and containers set the storage and are none."""
    return bool(os.environ.get(JOB))


def where_jobs_go() -> str:
    """Returns the part of ``make submit`` that says where: the storage as it was given, and a cluster to be named."""
    return f"STORAGE={os.environ.get(COPIES) or STORAGE} ADDRESS="


def find_run(asked: str) -> RunFolder:
    """Returns a run by its folder, by ``name/id``, or by its id alone. Raises SettingError with the nearest names where
    there is none, and with all of them where several have the id."""
    if not asked:
        raise SettingError("which run? Name one with RUN=, by its folder or its id")
    known = [os.path.relpath(path.parent, RUNS) for path in RUNS.glob("*/*/experiment.toml")]
    for path in (Path(asked), RUNS / asked):
        with suppress(OSError):  # a name that no file can have, too long for instance
            if (path / "experiment.toml").exists():
                return RunFolder(path.resolve())
    same = sorted(name for name in known if Path(name).name == asked)
    if len(same) > 1:
        raise SettingError(f"{len(same)} runs have the id {asked!r}: {', '.join(same)}; name one of them")
    if same:
        return RunFolder((RUNS / same[0]).resolve())
    hint = nearest(asked, known) if known else f"there are no runs below {RUNS} yet"
    shown = asked if len(asked) <= 100 else f"{asked[:100]}..."
    raise SettingError(f"no run {shown!r}: {hint}")
