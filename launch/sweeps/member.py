"""One member's part of a sweep: to train it from where it was left, or to score it.

On Ray, and on GPUs, as a process of its own, ``python -m launch.sweeps.member``, since a process has one connection to
Ray and one view of the GPUs. It reads its order, a line, from standard input, which then stays open: at its end the
sweep is gone, and the member ends too. What it prints is its log; how it went stands in a file when it ends by itself.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from experiments.registry import read_experiment
from experiments.sweep import Scoring
from experiments.text_experiment import TranslationExperiment
from launch import interrupts
from launch.checkpoints import place_of_run
from launch.runs import RUNS, RunFolder, held, named_run
from launch.scoring import score_run
from launch.session import resume, run_experiment
from launch.sweeps.retries import again, told
from suite.errors import CheckpointError, SuiteError
from suite.training.checkpoint import Storage, folders_of

END_S = 5.0
"""Seconds that a member has to end its workers and itself."""


@dataclass(frozen=True)
class Order:
    """What is to be done with a member."""

    what: Literal["train", "score"]
    folder: str
    """Below the folder of all runs."""
    experiment: str
    """As in experiment.toml."""
    launcher: str
    outcome: str
    """The file that says how it went."""
    at_work: str
    """The file whose being there says that scoring has its device."""
    scoring: Scoring | None = None

    def as_line(self) -> str:
        """Returns the order as a line of JSON."""
        return json.dumps(asdict(self)) + "\n"

    @classmethod
    def of_line(cls, line: str) -> Order:
        """Reads what ``as_line`` wrote."""
        values: dict[str, Any] = json.loads(line)
        scoring = values.pop("scoring")
        return cls(**values, scoring=Scoring(**scoring) if scoring else None)


def carry_out(order: Order, console: Console) -> None:
    """Trains or scores a member. Raises a SuiteError for what is no bug."""
    if order.what == "train":
        _train(order, console)
    elif order.launcher == "ray":
        from launch.sweeps.ray_scoring import on_a_device

        on_a_device(order)
    else:
        score(order, console)


def _train(order: Order, console: Console) -> None:
    folder = RUNS / order.folder
    family, _, id = order.folder.rpartition("/")
    if folders_of(Storage(place_of_run(folder))):  # whether they can be used or not
        resume(str(folder), "", order.launcher, console)
        return
    if folder.exists():
        with held(folder):
            aside = folder.with_name(f"{folder.name}-set-aside-{time.strftime('%Y%m%d-%H%M%S')}")
            folder.rename(aside)
        console.print(f"it was left before its first checkpoint: moved to {aside} and begun again")
    run_experiment(read_experiment(order.experiment), named_run(family, id), order.launcher, console)


def score(order: Order, console: Console) -> None:
    """Scores a member on one device: translating at one stage leaves no bubble, and the other devices are busy."""
    experiment, scoring = read_experiment(order.experiment), order.scoring
    assert isinstance(experiment, TranslationExperiment)
    assert scoring is not None
    run = RunFolder((RUNS / order.folder).resolve())
    found = score_run(
        run, console, beam=scoring.beam, languages=experiment.text.languages, max_pairs=scoring.max_pairs, stages=1
    )
    if found["step"] < experiment.train.steps:
        raise CheckpointError(
            f"{run.path} was scored at step {found['step']} of {experiment.train.steps}, its later checkpoints are not "
            "whole; move the run away, and the sweep trains it again"
        )


def log_console(file: Any) -> Console:
    """Returns a console that writes a log."""
    return Console(file=file, width=120, markup=False, highlight=False, soft_wrap=True)


def main() -> None:
    """Carries out the order on standard input. Exit codes: 0 done, 1 failed, 130 interrupted."""
    interrupts.install()
    order = Order.of_line(_line())
    threading.Thread(target=_end_with_the_sweep, daemon=True).start()
    outcome = Path(order.outcome)
    try:
        with interrupts.command():
            carry_out(order, log_console(sys.stdout))
    except BaseException as error:
        if interrupts.received():
            interrupts.leave()
        if not isinstance(error, Exception):
            raise
        if isinstance(error, SuiteError):
            print(f"error: {error}")
        else:
            traceback.print_exc()
        _write(outcome, {"told": told(error), "again": again(error).value})
        sys.exit(1)
    _write(outcome, {})


def _write(path: Path, values: dict[str, str]) -> None:
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(values) + "\n")
    draft.rename(path)


def _line() -> str:
    """Reads a line without the buffer of sys.stdin, whose lock a thread that waits for more would hold at the end."""
    read = b""
    while not read.endswith(b"\n"):
        more = os.read(0, 65536)
        if not more:
            sys.exit(130)  # the sweep ended meanwhile
        read += more
    return read.decode()


def _end_with_the_sweep() -> None:
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
