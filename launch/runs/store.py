"""A run's folder, ``runs/<name>/<id>/``, and the paths of the files in it."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import filelock

from experiments.base.hints import command, option
from launch.interrupts import JOB
from suite.errors import SettingError, nearest, shortened

STORAGE = os.environ.get("GPIPE_STORAGE", "")
"""The folder that all nodes of a cluster share, for submitted runs; empty on a single machine."""

ADDRESS, SOURCE = "GPIPE_ADDRESS", "GPIPE_SOURCE"
"""Environment variables of a submitted job: the address that it was submitted to, and the user's file and function, on
the submitting machine."""

FOLDER_LINE, REPORT_LINE = "folder: ", "report: "
"""Begin the lines with a run's folder, and with a report, that commands print; ``make submit`` finds them in a job's
log."""

RUNS = Path(STORAGE) / "runs" if STORAGE else Path("runs")
CACHE = Path(os.environ.get("GPIPE_CACHE") or (Path(STORAGE) / "cache" if STORAGE else ".cache"))
SHORT_RUNS = CACHE / "short_runs"  # of ``gpipe check`` and ``gpipe diff``; ``gpipe runs`` does not list them


class _File:
    """A file or folder of a run, by its path in the run's folder."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __get__(self, run: RunFolder, owner: type[RunFolder]) -> Path:
        return run.path / self._path


@dataclass(frozen=True)
class RunFolder:
    """Paths of one run's files."""

    path: Path

    experiment = _File("experiment.toml")
    """The fully resolved experiment."""
    plan_text = _File("plan.txt")
    """Cells and sizes, as printed at the start."""
    plan_json = _File("plan.json")
    """The plan as one JSON object."""
    schedule = _File("schedule.csv")
    """The schedule, where search or a file made it."""
    fewer_devices, fewer_devices_plan = _File("fewer_devices.toml"), _File("fewer_devices.json")
    """The reduced ones while devices are missing."""
    trace_folder = _File("trace")
    """One JSON Lines file per worker: its actions with their times."""
    perfetto = _File("trace.json")
    """The traces of all workers in one file, for Perfetto."""
    timeline = _File("timeline.png")
    """Plot of one step, measured above simulated."""
    metrics = _File("metrics.jsonl")
    """One line per step."""
    layers = _File("layers.jsonl")
    """Statistics of each layer, one line every ``train.layer_stats_every`` steps."""
    fingerprints = _File("fingerprints")
    """One JSON Lines file per worker: fingerprints of the tensors of the first ``train.fingerprint_steps`` steps."""
    record = _File("record.json")
    """The results of the run, written at its end."""
    published = _File("published.json")
    """The step of the last published checkpoint."""
    report = _File("report.html")
    """The page of the run."""
    scores = _File("scores.json")
    """BLEU and chrF, once scored; the translations are in the folder ``scores`` beside it."""
    samples = _File("samples.jsonl")
    """Translations of a few held-out strings at the run's end, one a line."""
    messages = _File("messages.log")
    """Messages for the terminal."""
    attempts = _File("attempts.jsonl")
    """Lines of each attempt: its start, its first step, and how it ended."""
    profile = _File("profile")
    """torch.profiler's traces of ``train.profile_steps``, one per worker."""
    gpu = _File("gpu")
    """Memory snapshots and NCCL's records of workers on GPUs that failed."""
    heartbeats = _File("heartbeats.json")
    """What each worker does now."""
    system = _File("system")
    """One JSON Lines file per worker: processor, memory, waiting times."""
    checkpoints = _File("checkpoints")
    """One folder per checkpoint."""
    wandb_log = _File("wandb/parts.log")
    """Output of wandb's own processes after the workers have ended."""

    @property
    def name(self) -> str:
        """The run's name and id, such as t12_400m/20261122-234121; its folder if it is not below that of all runs."""
        name = os.path.relpath(self.path, RUNS.resolve())
        return str(self.path) if name.startswith("..") else name

    def log(self, replica: int, stage: int) -> Path:
        """Standard output and error of one worker."""
        return self.path / "logs" / f"stage-{replica}-{stage}.log"


def new_run(name: str, below: Path = RUNS) -> RunFolder:
    """Creates the folder of a new run; its id is the date and time, with a suffix if that id is taken."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for id in (stamp, *(f"{stamp}-{attempt}" for attempt in range(1, 100))):
        with suppress(FileExistsError):
            (below / name / id).mkdir(parents=True)
            return named_run(name, id, below)
    raise SettingError(f"no free folder below {below / name} for {stamp}; wait a second and try again")


def remove_run(run: RunFolder) -> None:
    """Removes a run, and the folder of its name if there is no other run in it."""
    shutil.rmtree(run.path)
    with suppress(OSError):
        run.path.parent.rmdir()


def named_run(name: str, id: str, below: Path = RUNS) -> RunFolder:
    """Creates the folder of a run with the given id, such as a member of a sweep."""
    path = below / name / id
    (path / "logs").mkdir(parents=True)
    return RunFolder(path.resolve())


@contextmanager
def run_lock(run: Path, name: str = "lock") -> Iterator[None]:
    """A context that holds the lock ``name`` of a run. Raises SettingError when another process holds it."""
    lock = filelock.FileLock(run / name)
    try:
        acquired = lock.acquire(timeout=0.2)  # longer than ``is_locked`` holds a lock that it looks at
    except filelock.Timeout:
        raise SettingError(f"another process is using run {run}; wait until it ends, or stop it") from None
    with acquired:
        yield


def is_locked(run: Path) -> bool:
    """Whether a process, on this machine or where the storage knows locks, holds the lock of a run."""
    try:
        file = os.open(run / "lock", os.O_RDONLY)
    except OSError:  # there is none, or it is somebody else's: heartbeats tell more
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared, so that two readers do not see each other
    except OSError:
        return True
    finally:
        os.close(file)
    return False


def known_runs() -> list[str]:
    """Returns the names of all runs, ``name/id``, also those of sweeps."""
    return [os.path.relpath(path.parent, RUNS) for path in RUNS.glob("*/*/experiment.toml")]


def resume_command(run: RunFolder, settings: str = "") -> str:
    """Returns the command that resumes a run, with other settings if given. For a submitted job it is one to type on
    the submitting machine."""
    changed = {"SET": settings} if settings else {}
    if in_job():
        own = {"NAME": os.environ[SOURCE]} if os.environ.get(SOURCE) else {}
        return command("submit", **own, RUN=f"{run.path.parent.name}/{run.path.name}", **job_storage(), **changed)
    return command("resume", RUN=str(run.path), **changed)


def sync_command(run: RunFolder) -> str:
    """Returns the command that uploads a run's offline wandb records; for a submitted job one to type on its node."""
    if in_job():
        return f"wandb sync --include-offline {run.path}/wandb/offline-run-* (on the job's node)"
    return command("sync", RUN=str(run.path))


def in_job() -> bool:
    """Whether this is a submitted job. Slurm jobs and containers set GPIPE_STORAGE too, but are not."""
    return bool(os.environ.get(JOB))


def job_storage() -> dict[str, str]:
    """Returns the storage and the address that this job was submitted with."""
    return {"STORAGE": STORAGE, "ADDRESS": os.environ.get(ADDRESS, "")}


def find_run(requested: str) -> RunFolder:
    """Returns a run by its folder, by ``name/id``, by its id alone, or by a name that only one run has. Raises
    SettingError with the closest names if there is none, and with the matches if there are several."""
    if not requested:
        raise SettingError(f"no run given; choose one with {option('RUN')}, by its folder or its id")
    if run := run_at(requested):
        return run
    known = known_runs()
    matches = sorted(name for name in known if Path(name).name == requested)
    if len(matches) > 1:
        raise SettingError(f"{len(matches)} runs have the id {requested!r}: {', '.join(matches)}; choose one of them")
    if matches:
        return RunFolder((RUNS / matches[0]).resolve())
    for path in (Path(requested), RUNS / requested):
        with suppress(OSError):
            if path.is_dir():
                return _only_run_in(path)
    hint = closest_runs(requested, known) if known else f"there are no runs in {RUNS} yet"
    raise SettingError(f"no run {shortened(requested)!r}: {hint}")


def run_at(requested: str) -> RunFolder | None:
    """Returns the run with this folder or ``name/id``; None if there is none."""
    for path in (Path(requested), RUNS / requested):
        with suppress(OSError):  # not a valid file name, such as one that is too long
            if (path / "experiment.toml").exists():
                return RunFolder(path.resolve())
    return None


def closest_runs(requested: str, known: Sequence[str]) -> str:
    """Returns which runs have a similar name, or, because there may be hundreds, the command that lists them."""
    hint = nearest(requested, known)
    return hint if hint.startswith("did you mean") else f"{command('runs')} lists all {len(known)}"


def _only_run_in(folder: Path) -> RunFolder:
    """Returns the only run in a folder that is not a run's. Raises SettingError when there is none, or several."""
    inside = sorted(path.parent.name for path in folder.glob("*/experiment.toml"))
    if len(inside) == 1:
        return RunFolder((folder / inside[0]).resolve())
    if not inside:
        raise SettingError(
            f"{folder} has no experiment.toml: no run started there; {command('runs')} lists those that did"
        )
    shown = ", ".join(f"{folder}/{id}" for id in inside[-3:])
    raise SettingError(f"{folder} holds {len(inside)} runs; choose one of them, such as {shown}")
