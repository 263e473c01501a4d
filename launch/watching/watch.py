"""``make watch RUN=...``: follows a run that trains, from another terminal. It only reads.

step 40/100  loss 6.123 ...                                  the step line
stage 0   ... F3 [B3] R2 B2 ...   computes, 0 s              what each stage does now
stage 1   ... F2 [F3] B3 ...      waits for the activations from stage 0 of micro-batch 3, 0 s
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress

from rich.console import Console
from rich.live import Live
from rich.text import Text

from experiments.base.experiment import Experiment
from experiments.base.hints import command
from experiments.registry import read_experiment_file
from launch import interrupts
from launch.runs.store import RunFolder, find_run, resume_command
from launch.supervision.stall_report import stall_report
from launch.tracking.follower import LogTail, log_interval, mean_step_s, split_messages
from launch.tracking.step_line import WIDTH, figures, headed, validation_line
from launch.watching.run_state import Attempt, RunState, read_state
from launch.worker.heartbeat import read_heartbeats
from launch.worker.run_plan import RunPlan
from suite.errors import RunFileError, SettingError
from suite.paths import read_json
from suite.pipeline.model.topology import RankCoord
from suite.pipeline.schedule.config import ScheduleConfig
from suite.training.jsonl import last_line
from suite.training.metrics import LOSS, STEP, is_step

PERIOD_S = 0.5

GONE_S = 3.0
"""Seconds without a sign of a run that did not end by itself, after which it counts as interrupted."""

LINES_EVERY_S = 10.0
"""Seconds between two grids without a terminal."""


def watch(requested: str, console: Console) -> None:
    """Shows a run until it ends. Raises SettingError for an unknown run and for one that does not train now."""
    run = find_run(requested)
    state = read_state(run)
    if state.name != "training":
        raise SettingError(f"run {run.name} does not train now: {describe_end(run, state)}")
    view = WatchView(run, read_experiment_file(run.experiment))
    with interrupts.interrupt_message(lambda: f"run {run.name} goes on"):
        follow = _follow_live if console.is_terminal else _follow_lines
        follow(view, console)
    console.print(f"run {run.name}: {describe_end(run, view.state)}")


def describe_end(run: RunFolder, state: RunState) -> str:
    """Returns how a run ended, and what to do next."""
    if state.name == "finished":
        return f"it is finished; {command('report', RUN=run.name)} writes its page"
    if state.last is None:
        return f"it never started; {resume_command(run)} starts it"
    cause = f" ({state.cause})" if state.cause else ""
    return f"it {'failed' if state.name == 'failed' else 'was interrupted'}{cause}; {resume_command(run)} continues it"


class WatchView:
    """What the folder of a run shows now."""

    def __init__(self, run: RunFolder, experiment: Experiment) -> None:
        self.run, self._experiment = run, experiment
        self._metrics, self._messages = LogTail(run.metrics, from_end=True), LogTail(run.messages, from_end=True)
        self._last = last_line(run.metrics, LOSS)
        self._mean_step_s: float | None = None
        self._log_every = log_interval(experiment.train)
        self.state = read_state(run)
        self._seen_s = time.monotonic()

    def poll(self) -> list[tuple[str, bool]]:
        """Reads the folder; returns the new lines that the run prints without a terminal, and whether each is of a
        step, not a message or a validation."""
        before, after = split_messages(self._messages.lines())
        self.state = read_state(self.run)
        metrics = list(self._new_metrics())
        if self.state.name == "training":
            self._seen_s = time.monotonic()
        return [*((line, False) for line in before), *metrics, *((line, False) for line in after)]

    def _new_metrics(self) -> Iterator[tuple[str, bool]]:
        first_step = self._first_step()
        if first_step is None:  # an attempt starts: which lines are its own is known in a moment
            return
        for line in self._metrics.values():
            # a restarted attempt rewrites the file: its first lines are of steps that were shown before
            if is_step(line) and line[STEP] > first_step:
                self._last, step = line, int(line[STEP])
                self._mean_step_s = mean_step_s(self._mean_step_s, line)
                if step % self._log_every == 0 or step == self._experiment.train.steps:
                    yield self.step_line(), True
            elif line.get(STEP, 0) > first_step and (text := validation_line(line)):
                yield text, False

    def _first_step(self) -> int | None:
        """Returns the first step of the last attempt; None while it trains and no worker has reported it."""
        attempt = self.state.last
        heartbeats = read_heartbeats(self.run.heartbeats, attempt.number) if attempt is not None else []
        reported = [heartbeat.first_step for heartbeat in heartbeats if heartbeat.first_step is not None]
        return max(reported, default=None if self.state.name == "training" else 0)

    @property
    def has_ended(self) -> bool:
        """Whether the run has ended. One without an end in its record may be between two attempts on another
        machine."""
        if self.state.name == "training":
            return False
        return self.state.name == "finished" or time.monotonic() - self._seen_s > GONE_S

    def step_line(self, width: int = WIDTH) -> str:
        """Returns the line of the last step in at most ``width`` columns."""
        if self._last is None:
            return f"no step of {self._experiment.train.steps} is finished yet"
        steps = self._experiment.train.steps
        ranked = figures(self._last, steps, self._experiment.unit, self._mean_step_s)
        if self._mean_step_s is None:  # one step tells nothing about the time left
            ranked = ranked[:-1]
        return headed(int(self._last[STEP]), steps, ranked, width)

    def grid(self) -> str:
        """Returns one row a stage: where it is in its schedule."""
        attempt = self.state.last
        if attempt is None:
            return "  workers are starting"
        stages, replicas = int(attempt.fields["K"]), int(attempt.fields["R"])
        coords = [RankCoord(rank, stages, replicas) for rank in range(stages * replicas)]
        heartbeats = {
            coords[0].rank_of(heartbeat.replica, heartbeat.stage): heartbeat
            for heartbeat in read_heartbeats(self.run.heartbeats, attempt.number)
        }
        return stall_report(self._schedule(attempt), coords, int(attempt.fields["M"]), heartbeats, {})

    def _schedule(self, attempt: Attempt) -> ScheduleConfig:
        """Returns the schedule of an attempt: that of a run that lost devices, or the requested one; without either,
        one with the same actions but no recomputes. The grid then shows recomputes without their neighbours."""
        for path in (self.run.shrunk_plan, self.run.plan_json):
            plan = read_json(path) or {}
            if all(plan.get(name) == attempt.fields[name] for name in ("K", "R", "M")):
                with suppress(RunFileError):
                    return RunPlan.read(path).schedule_config
        return ScheduleConfig("fill_drain", (0,))


def _follow_live(view: WatchView, console: Console) -> None:
    """Shows the step line and the grid in place, and messages and validations above them."""
    with Live(console=console, refresh_per_second=4, transient=True) as live:
        while not view.has_ended:
            for line, is_of_step in view.poll():
                if not is_of_step:
                    live.console.print(line)
            live.update(Text(f"{view.step_line(console.width)}\n{view.grid()}", no_wrap=True, overflow="ellipsis"))
            time.sleep(PERIOD_S)
    console.print(view.step_line(console.width))


def _follow_lines(view: WatchView, console: Console) -> None:
    """Prints the lines of the run, and the grid now and then."""
    due_s = 0.0
    while not view.has_ended:
        for line, _ in view.poll():
            console.print(line)
        if view.state.name == "training" and time.monotonic() >= due_s:
            due_s = time.monotonic() + LINES_EVERY_S
            console.print(view.grid())
        time.sleep(PERIOD_S)
