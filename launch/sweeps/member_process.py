"""Trains or resumes one member of a sweep, or scores it; starts the processes of members, and ends them with the sweep.

On Ray and on GPUs each member is a process, ``python -m launch.sweeps.member_process``, because a process has one
connection to Ray and one view of the GPUs. It reads its MemberSpec, a line, from standard input, which then stays open:
at end of file the sweep is dead, and the member exits too. Its output is its log; its outcome is in a file unless it is
killed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from rich.console import Console

from experiments.registry import read_experiment
from launch import interrupts
from launch.backends.select import select_backend
from launch.runs.checkpoints import checkpoint_location_of_run
from launch.runs.store import RUNS, named_run, run_lock
from launch.sweeps.member import MemberSpec, log_console, score, score_on_ray
from launch.sweeps.retries import MemberError, RetryDecision, decide_retry, message_of
from launch.train.command import resume, run_experiment
from launch.train.session import Session
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
    session = Session(select_backend(spec.launcher), console, shows_samples=False)
    run_experiment(read_experiment(spec.experiment), partial(named_run, family, id), session)


class ProcessPool:
    """Runs each member in a process with its own session, so that Ctrl-C reaches only the sweep."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[str]] = set()
        self._closed = False

    def run(self, spec: MemberSpec, log_file: Path, variables: Mapping[str, str]) -> None:
        """Runs a member to its end, with ``variables`` in its environment. Raises MemberError when it fails."""
        outcome_file = Path(spec.outcome_file)
        outcome_file.unlink(missing_ok=True)
        process = self._start(spec, log_file, variables)
        try:
            process.wait()
        finally:
            if process.returncode != 0:
                _kill_session(process)  # its workers may have survived it
            with self._lock:
                self._running.discard(process)
            if process.stdin is not None:
                with suppress(BrokenPipeError):  # closing flushes what it did not read
                    process.stdin.close()
        try:
            failure: dict[str, str] = json.loads(outcome_file.read_text())
        except FileNotFoundError:
            code = process.returncode
            how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
            raise MemberError(
                f"its process ended {how} without a report; its log is {log_file}", RetryDecision.AGAIN
            ) from None
        if failure:
            raise MemberError(failure["message"], RetryDecision(failure["retry"]))

    def _start(self, spec: MemberSpec, log_file: Path, variables: Mapping[str, str]) -> subprocess.Popen[str]:
        with self._lock, log_file.open("a") as file:
            if self._closed:
                raise MemberError("the sweep is stopping", RetryDecision.NO)
            process = subprocess.Popen(
                [sys.executable, "-m", "launch.sweeps.member_process"],
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **variables},
                start_new_session=True,
                text=True,
            )
            self._running.add(process)
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended; its exit code says why
            process.stdin.write(spec.as_line())
            process.stdin.flush()
        return process

    def end(self) -> None:
        """Ends all members and their workers: by SIGTERM, and after END_S by SIGKILL."""
        with self._lock:
            self._closed = True
            running = list(self._running)
        for process in running:
            process.terminate()
        until = time.monotonic() + END_S
        try:
            while time.monotonic() < until and any(process.poll() is None for process in running):
                time.sleep(0.1)
        finally:
            for process in running:
                _kill_session(process)


def _kill_session(process: subprocess.Popen[str]) -> None:
    """Kills a member and its workers; their process group keeps its id after its leader's death."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


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
