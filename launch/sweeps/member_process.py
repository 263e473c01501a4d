"""Trains or resumes one member of a sweep, or scores it.

On Ray and on GPUs each member is a process, ``python -m launch.sweeps.member_process``, because a process has one
connection to Ray and one view of the GPUs. It reads its MemberSpec, a line, from standard input, which then stays open:
at end of file the sweep is dead, and the member exits too. Its output is its log; its outcome is in a file unless it is
killed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

from rich.console import Console

from experiments.registry import read_experiment
from launch import interrupts
from launch.runs.checkpoints import checkpoint_location_of_run
from launch.runs.store import RUNS, named_run, run_lock
from launch.sweeps.member import MemberSpec, log_console, score
from launch.sweeps.retries import decide_retry, message_of
from launch.train.command import resume, run_experiment
from suite.errors import SuiteError
from suite.paths import write_atomically
from suite.training.checkpoint import Storage, folders_of

END_S = 5.0
"""Seconds for a member to end its workers and itself."""


def run_member(spec: MemberSpec, console: Console) -> None:
    """Trains or scores a member. Raises a SuiteError for a fault that is not a bug."""
    if spec.what == "train":
        _train(spec, console)
    elif spec.launcher == "ray":
        from launch.sweeps.ray_scoring import score_on_ray

        score_on_ray(spec)
    else:
        score(spec, console)


def _train(spec: MemberSpec, console: Console) -> None:
    folder = RUNS / spec.folder
    family, _, id = spec.folder.rpartition("/")
    if folders_of(Storage(checkpoint_location_of_run(folder))):  # valid or not
        resume(str(folder), "", spec.launcher, console)
        return
    if folder.exists():
        with run_lock(folder):
            backup = folder.with_name(f"{folder.name}-set-aside-{time.strftime('%Y%m%d-%H%M%S')}")
            folder.rename(backup)
        console.print(f"it stopped before its first checkpoint: moved to {backup} and restarted")
    run_experiment(read_experiment(spec.experiment), named_run(family, id), spec.launcher, console)


def main() -> None:
    """Runs the MemberSpec on standard input. Exit codes: 0 done, 1 failed, 130 interrupted."""
    interrupts.install()
    spec = MemberSpec.of_line(_read_spec_line())
    threading.Thread(target=_exit_with_sweep, daemon=True).start()
    outcome_file = Path(spec.outcome_file)
    try:
        with interrupts.interruptible():
            run_member(spec, log_console(sys.stdout))
    except BaseException as error:
        if interrupts.was_interrupted():
            interrupts.kill_children_and_exit()
        if not isinstance(error, Exception):
            raise
        if isinstance(error, SuiteError):
            print(f"error: {error}")
        else:
            traceback.print_exc()
        failure = {"message": message_of(error), "retry": decide_retry(error).value}
        write_atomically(outcome_file, json.dumps(failure) + "\n")
        sys.exit(1)
    write_atomically(outcome_file, "{}\n")


def _read_spec_line() -> str:
    """Reads a line without sys.stdin's buffer: a thread waiting for more would hold its lock at exit."""
    received_bytes = b""
    while not received_bytes.endswith(b"\n"):
        chunk = os.read(0, 65536)
        if not chunk:
            sys.exit(130)  # the sweep ended meanwhile
        received_bytes += chunk
    return received_bytes.decode()


def _exit_with_sweep() -> None:
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
