"""Plans a run and trains it on one backend: workers, lost devices, and what is printed at the end."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from uuid import uuid4

from rich.console import Console

from experiments.base.experiment import Experiment
from experiments.base.figures import in_figures
from experiments.planning.choose import smaller_runs
from experiments.planning.problem import estimated_costs
from experiments.planning.report import PlanReport, lines_of
from experiments.planning.request import noted_plans
from experiments.planning.timeline_plot import draw
from launch import interrupts
from launch.backends.backend import Backend
from launch.inference.held_out_samples import described, translate_held_out
from launch.planning.layer_costs import MeasuredCosts
from launch.runs.checkpoints import check_unused, checkpoint_location
from launch.runs.store import CACHE, FOLDER_LINE, RunFolder, in_job, resume_command, run_lock, sync_command
from launch.supervision.attempt_log import AttemptLog
from launch.supervision.supervisor import Supervisor
from launch.tracking.follower import Follower
from launch.tracking.progress import log_when_long
from launch.tracking.wandb_finish import publish
from launch.tracking.wandb_sync import unsynced_parts
from launch.train import summary
from launch.train.finished import after_interrupt
from launch.train.step_check import StepCheck
from launch.watching.report import update_page
from launch.watching.run_data import RunData
from launch.worker.attempt import Attempt, draft_of, run_logger
from launch.worker.run_plan import RunPlan
from suite.errors import PlacementError, PlanError, typed_line
from suite.log import Log
from suite.paths import hide_secrets, read_json, write_atomically
from suite.pipeline.planning.devices import GIB
from suite.pipeline.planning.flops import StepFlops
from suite.training.trace import perfetto, read_traces


@dataclass(frozen=True)
class Session:
    """Plans and trains on one backend."""

    backend: Backend
    console: Console
    shows_samples: bool = True
    """Whether translations of a few held-out strings end the run; not in a sweep, which scores its members."""
    is_brief: bool = False
    """Whether a few steps are trained only to be compared: costs are estimated, operations are not counted, held-out
    data not evaluated, no checkpoint is made for the last step, and no page drawn."""
    began: float = field(default_factory=time.monotonic)
    prepared_s: dict[str, float] = field(default_factory=dict)
    """``data_s`` and ``planning_s`` of the last plan."""

    def plan(self, chosen: Experiment, settings: str = "", best: bool = False) -> PlanReport:
        """Plans a run on the available devices and prints the plan; with ``best`` the fastest K, R, M and schedule that
        the settings allow, and the next ones. Raises PlanError when it does not fit."""
        data = chosen.data_folder(CACHE).resolve()
        measured_costs = MeasuredCosts(CACHE / "costs", self.console.print, self.backend, data)
        find_costs = estimated_costs if self.is_brief else measured_costs
        began = time.monotonic()
        with log_when_long(f"planning {chosen.name}", self.console.print) as set_part:
            work, cluster = chosen.with_prepared(data), self.backend.cluster()
            given = find_costs, settings, cluster.notes, best, set_part, self.backend.workers
            plans = noted_plans(work, cluster, *given)
        note = f"{plans[0].experiment.title}; {_workers(plans[0].experiment)} workers"
        planned = replace(plans[0], notes=(note, *plans[0].notes))
        for line in (*planned.lines(is_brief=True), *(lines_of(plans) if best else ())):
            self.console.print(line)
        self.prepared_s.update(data_s=began - self.began, planning_s=time.monotonic() - began)
        return planned

    def train(
        self, run: RunFolder, planned: PlanReport, resumed: bool = False, checkpoint_step: int | None = None
    ) -> None:
        """Trains what is planned, and prints a summary. Resumes from the checkpoint of ``checkpoint_step``, otherwise
        from the newest valid one."""
        chosen = planned.experiment
        advice = interrupts.interrupt_message(
            lambda: after_interrupt(run, chosen), lambda: f"the run is finished: {run.path}"
        )
        with run_lock(run.path), advice:
            self.console.print(f"{FOLDER_LINE}{run.path}")
            current = CurrentRun(self, run, planned, resumed, checkpoint_step)
            try:
                self._run_workers(current)
                samples = described(translate_held_out(run, chosen, self.console)) if self.shows_samples else []
            finally:
                if not (self.is_brief or interrupts.was_interrupted()):
                    _draw_trace(run, current.planned)
                    update_page(run, self.console, holds_lock=True)
            publish(run, "end", self.console.print)
            _summarise(run, current.planned, self.console, samples)

    def _run_workers(self, current: CurrentRun) -> None:
        """Runs the workers to the end. The experiment and plan replace those in the run's folder only once the workers
        have started: a resume that cannot start changes nothing."""
        run, attempt, requested = current.run, current.attempt, current.planned
        files = run.experiment, run.plan_json
        if not attempt.resume:
            check_unused(checkpoint_location(run, requested.experiment))
        written = tuple(map(draft_of, files)) if attempt.resume else files
        _write_records(requested, current.plan, *written)
        if not attempt.resume:
            _write_plan_text(run, requested)
        AttemptLog(run.attempts).note(**self.prepared_s)
        log = run_logger(run.messages)
        check = StepCheck(run, lambda: current.planned, log)
        try:
            with (
                Follower(run, requested.experiment, self.console, check.step),
                self.backend.open_launcher(attempt, requested.placement) as launcher,
            ):
                Supervisor(requested.experiment, current.plan, attempt, launcher, current.fitted_to, log).run()
        finally:
            if draft_of(run.experiment).exists():  # the workers have not started
                for file in files:
                    draft_of(file).unlink(missing_ok=True)
            else:
                _write_plan_text(run, requested)


class CurrentRun:
    """A run as it is trained now. Lost devices may shrink it below the request."""

    def __init__(
        self, session: Session, run: RunFolder, planned: PlanReport, resumed: bool, checkpoint_step: int | None
    ) -> None:
        self._session, self._requested = session, planned
        self.run, self.planned, self.plan = run, planned, _run_plan(session, planned)
        self.attempt = Attempt(
            run.path,
            planned.experiment.data_folder(CACHE).resolve(),
            _workers(planned.experiment),
            use_gpu=planned.cluster.kind == "gpu",
            resume=resumed,
            checkpoint_step=checkpoint_step,
            owner=f"{socket.gethostname()}, process {os.getpid()}, {uuid4().hex}",
            working_dir=None if in_job() else Path.cwd(),
            is_brief=session.is_brief,
            costs=(CACHE / "costs").resolve(),
        )

    def fitted_to(self, devices: int) -> tuple[Experiment, RunPlan, Attempt]:
        """Returns the run as requested, otherwise as it is fastest on ``devices`` devices. Raises PlacementError
        without a plan that fits."""
        requested, fault = self._requested, ""
        for experiment in smaller_runs(requested, devices, self._session.backend.cluster):
            known = [plan for plan in (requested, self.planned) if plan.experiment.pipeline == experiment.pipeline]
            try:
                planned = known[0] if known else self._session.plan(experiment)
            except PlanError as error:
                fault = fault or f" ({error.errors[0]})"
                continue
            if planned is not self.planned:
                self.planned, self.plan = planned, _run_plan(self._session, planned)
                has_fewer = planned is not requested
                self.attempt = replace(self.attempt, workers=_workers(experiment), on_fewer_devices=has_fewer)
                if has_fewer:
                    _write_records(planned, self.plan, self.run.fewer_devices, self.run.fewer_devices_plan)
            return experiment, self.plan, self.attempt
        raise PlacementError(
            f"{devices} devices are left, and no plan of {requested.experiment.name} fits them{fault}; when more are "
            f"back, `{resume_command(self.run)}` continues from the latest checkpoint"
        )


def _workers(experiment: Experiment) -> int:
    return experiment.pipeline.stages * experiment.pipeline.replicas


def _write_records(planned: PlanReport, plan: RunPlan, experiment_file: Path, plan_file: Path) -> None:
    """Writes an experiment and its plan for the workers. The experiment has the URL as it was given, which a resume
    needs. If that has a secret, only this user can read the file."""
    record = planned.as_dict() | asdict(plan)
    record |= {
        "pipeline": planned.experiment.pipeline.model_dump(mode="json"),
        "timeline": planned.plan.timeline.as_lists(),
    }
    write_atomically(plan_file, json.dumps(record) + "\n")
    text = planned.experiment.to_toml()
    write_atomically(experiment_file, text, private=hide_secrets(text) != text)


def _write_plan_text(run: RunFolder, planned: PlanReport) -> None:
    write_atomically(run.plan_text, "\n".join(planned.lines()) + "\n")
    if rows := planned.plan.schedule_config.rows:
        write_atomically(run.schedule, "\n".join(rows).replace(" ", ",") + "\n")
    else:
        run.schedule.unlink(missing_ok=True)


def _run_plan(session: Session, planned: PlanReport) -> RunPlan:
    plan, cluster = planned.plan, planned.cluster
    flops = None if session.is_brief else _step_flops(planned, session.console.print)
    # stages on cores share caches and memory, so a plan of each is not exact
    compared = range(plan.pipeline.stages if cluster.kind == "gpu" and planned.layer_costs.measured else 0)
    busy_s = tuple(plan.timeline.busy(stage, "FRIBW") for stage in compared)
    return RunPlan(plan.layers_per_cell, plan.schedule_config, planned.step_s, flops, busy_s, cluster.logits_bytes)


def _step_flops(planned: PlanReport, log: Log) -> StepFlops | None:
    try:
        return planned.step_flops()
    except Exception as error:  # layers of a user's own may need values, of which fake tensors have none
        log(f"the run has no FLOP/s and no MFU, because counting failed: {typed_line(error)}")
        return None


def _draw_trace(run: RunFolder, planned: PlanReport) -> None:
    """Writes the trace for Perfetto and a plot of the traced step of median length."""
    if not (traces := read_traces(run.trace_folder)):
        return
    run.perfetto.write_text(json.dumps(perfetto(traces)))
    by_length = sorted((trace for trace in traces if trace.replica == 0), key=lambda trace: trace.timeline.seconds)
    median = by_length[len(by_length) // 2]
    title = f"{planned.experiment.name}, step {median.step + 1}"
    draw([("measured", median.timeline), (planned.kind, planned.plan.timeline)], run.timeline, title)


def _summarise(run: RunFolder, planned: PlanReport, console: Console, samples: Sequence[str]) -> None:
    record, data = read_json(run.record) or {}, RunData(run, holds_lock=True)
    unit, wandb_run = record["unit"], record["wandb_run"]
    traced = [trace.timeline for trace in read_traces(run.trace_folder) if trace.replica == 0]
    hint = f", recorded offline; to upload it: {sync_command(run)}" if unsynced_parts(run) else ""
    for line in [
        f"done: {record['steps']} steps, {record[unit]:,} {unit} in {record['seconds']:.0f} s "
        f"({in_figures(record[f'{unit}_per_second'])} {unit}/s, {record['threads']} threads per worker); peak memory "
        f"of all workers: {record['peak_memory_bytes'] / GIB:.2f} GiB{summary.describe_utilization(record)}",
        *summary.describe_step(planned, traced, data.steps_as_planned(planned.step_s)),
        *summary.describe_wall_time(data.wall_s),
        "; ".join([summary.describe_losses(record), summary.describe_scores(record), *summary.describe_best(record)]),
        *samples,
        *([f"wandb run: {wandb_run}{hint}"] if wandb_run else []),
        f"{FOLDER_LINE}{run.path}",
    ]:
        console.print(line)
