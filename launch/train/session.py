"""Plans a run and trains it on one backend: workers, lost devices, and what is printed at the end."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from uuid import uuid4

from rich.console import Console

from experiments.base.experiment import Experiment
from experiments.base.hints import option
from experiments.planning.neighbours import shrunk_to
from experiments.planning.plan_report import PlanReport, in_figures
from experiments.planning.planner import plan_workload
from experiments.planning.timeline_plot import draw
from launch import interrupts
from launch.backends.backend import Backend
from launch.inference.held_out_samples import described, translate_held_out
from launch.planning.layer_costs import cost_model
from launch.runs.checkpoints import (
    check_unused,
    checkpoint_location,
)
from launch.runs.store import (
    CACHE,
    FOLDER_LINE,
    RunFolder,
    in_job,
    resume_command,
    run_lock,
    sync_command,
)
from launch.supervision.supervisor import Supervisor
from launch.tracking.follower import Follower
from launch.tracking.progress import log_when_long
from launch.tracking.wandb_finish import publish
from launch.tracking.wandb_sync import unsynced_parts
from launch.train.finished import after_interrupt
from launch.train.step_check import StepCheck
from launch.train.summary import describe_best, describe_losses, describe_scores, describe_step, describe_utilization
from launch.watching.report import update_page
from launch.worker.attempt import AttemptSpec, run_logger, threads_of
from suite.errors import PlacementError, PlanError, first_line
from suite.log import Log
from suite.paths import hide_secrets, read_json, sync_folder, write_atomically
from suite.pipeline.planning.devices import GIB
from suite.pipeline.planning.flops import StepFlops
from suite.pipeline.schedule.timeline import text
from suite.training.metrics import read_steps
from suite.training.trace import perfetto, read_traces


def _data_of(chosen: Experiment) -> Path:
    return chosen.data_folder(CACHE).resolve()


@dataclass(frozen=True)
class Session:
    """Plans and trains on one backend."""

    backend: Backend
    console: Console
    resumes: bool = False
    shows_samples: bool = True
    """Whether translations of a few held-out strings end the run; not in a sweep, which scores its members."""

    def plan(self, chosen: Experiment, settings: str = "") -> PlanReport:
        """Plans a run on the available devices and prints the plan. Raises PlanError when it does not fit."""
        workers, threads = chosen.pipeline.stages * chosen.pipeline.replicas, threads_of(chosen)
        notes = [f"{chosen.title}; {workers} workers, {threads} threads each"]
        find_costs = cost_model(CACHE / "costs", self.console.print, self.backend, _data_of(chosen), self.resumes)
        with log_when_long(f"planning {chosen.name}", self.console.print) as set_part:
            work = chosen.with_prepared(_data_of(chosen))
            planned = plan_workload(work, self.backend.cluster(), find_costs, tuple(notes), settings, set_part)
        for line in planned.lines():
            self.console.print(line)
        return planned

    def train(
        self, run: RunFolder, chosen: Experiment, planned: PlanReport, resumed: bool = False,
        checkpoint_step: int | None = None,
    ) -> None:  # fmt: skip
        """Trains and prints a summary. Resumes from the checkpoint of ``checkpoint_step``, otherwise from the newest
        valid one."""
        advice = interrupts.interrupt_message(
            lambda: after_interrupt(run, chosen), lambda: f"the run is finished: {run.path}"
        )
        with run_lock(run.path), advice:
            self.console.print(f"{FOLDER_LINE}{run.path}")
            state = CurrentRun(run, chosen, planned, resumed, self.plan, self.console.print)
            state.spec = replace(state.spec, checkpoint_step=checkpoint_step)
            try:
                self._run_workers(state)
                samples = described(translate_held_out(run, chosen, self.console)) if self.shows_samples else []
            finally:
                if not interrupts.was_interrupted():
                    _show_trace(run, state.planned, self.console)
                    update_page(run, self.console, holds_lock=True)
            publish(run, "end", self.console.print)
            _summarise(run, state.planned, self.console, samples)

    def _run_workers(self, state: CurrentRun) -> None:
        """Runs the workers to the end. The experiment and plan replace those in the run's folder only once the workers
        have started: a resume that cannot start changes nothing."""
        spec, chosen = state.spec, state.experiment
        _write_experiment(spec.draft, chosen)
        if not spec.resume:
            check_unused(checkpoint_location(spec.run, chosen))
            spec.draft.replace(spec.run.experiment)
            sync_folder(spec.run.path)
            state.write_plan()
        log = run_logger(spec.run.messages)
        check = StepCheck(spec.run, lambda: state.planned, log)
        try:
            with (
                Follower(spec.run, chosen, self.console, check.step),
                self.backend.started(spec, state.planned.placement) as launcher,
            ):
                Supervisor(spec, chosen, launcher, state.plan_for, log).run()
        finally:
            if spec.draft.exists():  # the workers have not started
                spec.draft.unlink()
            else:
                state.write_plan()


class CurrentRun:
    """A run as it is trained now: experiment, plan and attempt. Lost devices may shrink them below the request."""

    def __init__(
        self, run: RunFolder, chosen: Experiment, planned: PlanReport, resumed: bool,
        make_plan: Callable[[Experiment], PlanReport], log: Log,
    ) -> None:  # fmt: skip
        self._requested, self._first_plan, self._make_plan, self._log = chosen, planned, make_plan, log
        self.experiment, self.planned, self.spec = chosen, planned, _attempt_spec(run, chosen, planned, resumed, log)

    def plan_for(self, devices: int) -> tuple[AttemptSpec, Experiment]:
        """Returns the attempt closest to the requested one that fits on ``devices`` devices.

        Raises PlacementError if none fits.
        """
        planned = self._first_plan
        for experiment in shrunk_to(self._requested, devices):
            try:
                if experiment != self._requested:
                    planned = self._make_plan(experiment)
            except PlanError:
                continue
            if experiment != self.experiment:
                self.experiment, self.planned = experiment, planned
                spec = _attempt_spec(self.spec.run, experiment, planned, True, self._log)
                self.spec = replace(spec, shrunk=experiment != self._requested)
                if self.spec.shrunk:
                    _write_experiment(self.spec.run.shrunk, experiment)
            return self.spec, experiment
        raise PlacementError(
            f"{devices} devices are left, and no plan of {self._requested.name} fits them; when more devices are back, "
            f"`{resume_command(self.spec.run)}` continues from the latest checkpoint"
        )

    def write_plan(self) -> None:
        """Writes the plan of the requested experiment to the run's folder."""
        run, plan = self.spec.run, self._first_plan
        write_atomically(run.plan, "\n".join(plan.lines()) + "\n")
        record = plan.as_dict() | {
            "pipeline": self._requested.pipeline.model_dump(mode="json"),
            "max_live_graphs": plan.plan.schedule_config.max_live_graphs,
            "timeline": plan.plan.timeline.as_lists(),
        }
        write_atomically(run.plan_record, json.dumps(record) + "\n")


def _write_experiment(path: Path, experiment: Experiment) -> None:
    """Writes an experiment with the URL as it was given, which a resume needs. If the URL has a secret, only this user
    can read the file."""
    text = experiment.to_toml()
    write_atomically(path, text, private=hide_secrets(text) != text)


def _attempt_spec(run: RunFolder, chosen: Experiment, planned: PlanReport, resumed: bool, log: Log) -> AttemptSpec:
    plan, owner = planned.plan, f"{socket.gethostname()}, process {os.getpid()}, {uuid4().hex}"
    return AttemptSpec(
        run.path, _data_of(chosen), plan.layers_per_cell, plan.schedule_config, planned.cluster.kind == "gpu", resumed,
        step_s=plan.timeline.seconds, flops=_step_flops(planned, log), costs=(CACHE / "costs").resolve(),
        logits_bytes=planned.cluster.logits_bytes, owner=owner,
        working_dir=None if in_job() else Path.cwd(),
    )  # fmt: skip


def _step_flops(planned: PlanReport, log: Log) -> StepFlops | None:
    try:
        return planned.step_flops()
    except Exception as error:  # layers of a user's own may need values, of which fake tensors have none
        log(f"the run has no FLOP/s and no MFU, because counting failed: {type(error).__name__}: {first_line(error)}")
        return None


def _show_trace(run: RunFolder, planned: PlanReport, console: Console) -> None:
    """Writes the trace for Perfetto and a plot of the traced step of median length, and prints that step as text."""
    traces = read_traces(run.traces)
    if not traces:
        console.print(
            f"no step was traced: the first two steps after a start are traced only with {option('SET', 'trace=true')}"
        )
        return
    run.trace.write_text(json.dumps(perfetto(traces)))
    by_length = sorted((trace for trace in traces if trace.replica == 0), key=lambda trace: trace.timeline.seconds)
    median = by_length[len(by_length) // 2]
    measured, simulated = median.timeline, planned.plan.timeline
    title = f"{planned.work.name}, step {median.step + 1}"
    draw([("measured", measured), (planned.kind, simulated)], run.timeline, title)
    console.print(f"step {median.step + 1}, measured: {measured.seconds:.3f} s, idle {measured.bubble:.1%}")
    console.print(text(measured))
    console.print(f"{planned.kind}: {simulated.seconds:.3f} s, idle {simulated.bubble:.1%}")
    console.print(text(simulated))
    console.print(f"trace: {run.trace} (opens in ui.perfetto.dev), plot: {run.timeline}")


def _summarise(run: RunFolder, planned: PlanReport, console: Console, samples: Sequence[str]) -> None:
    record = read_json(run.record) or {}
    unit = record["unit"]
    traced = [trace.timeline for trace in read_traces(run.traces) if trace.replica == 0]
    hint = f", recorded offline; to upload it: {sync_command(run)}" if unsynced_parts(run) else ""
    lines = [
        f"done: {record['steps']} steps, {record[unit]:,} {unit} in {record['seconds']:.0f} s "
        f"({in_figures(record[f'{unit}_per_second'])} {unit}/s, {record['threads']} threads per worker)",
        *describe_step(planned, traced, read_steps(run.metrics)),
        *describe_utilization(record),
        describe_losses(record),
        describe_scores(record),
        *describe_best(record),
        *samples,
        f"peak memory of all workers: {record['peak_memory_bytes'] / GIB:.2f} GiB",
        f"wandb run: {record['wandb_run'] or 'none'}{hint}",
        f"{FOLDER_LINE}{run.path}",
    ]
    for line in lines:
        console.print(line)
