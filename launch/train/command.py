"""Runs a training run: resolves the experiment, prepares data, plans, starts the workers, prints a summary."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, replace
from operator import attrgetter
from typing import Any

from rich.console import Console

from experiments.base.experiment import Experiment
from experiments.base.hints import command
from experiments.names import Scale
from experiments.planning.pipeline_settings import split_pipeline_auto
from experiments.planning.request import check_request
from experiments.registry import find, read_experiment_file, resolve
from launch.backends.backend import Backend
from launch.backends.processes import DATA_LIBRARIES
from launch.backends.select import select_backend
from launch.runs.checkpoints import check_published, checkpoint_location, checkpoints_to_use
from launch.runs.store import CACHE, RunFolder, find_run, new_run
from launch.tracking.progress import log_when_long
from launch.train.finished import finished_record, how_to_go_on
from launch.train.session import Session
from launch.watching.run_state import unexpected_content
from launch.worker.devices import with_available_precision
from launch.worker.run_plan import RunPlan
from suite.errors import CheckpointError, DataError, SettingError
from suite.paths import read_json
from suite.settings import AUTO
from suite.training.checkpoint import Choice, check_model, current, list_checkpoints
from suite.training.checkpoint.object_store import check_url
from suite.training.metrics import check_metrics
from suite.training.profiling import profiled_steps
from suite.training.update_rule import learning_rate


def start(name: str, scale: Scale, settings: str, launcher: str, console: Console) -> RunFolder:
    """Starts a new run of an experiment; returns its folder. Raises a SuiteError for what the user can fix."""
    find(name)  # an unknown name fails before Ray starts
    with closing(select_backend(launcher)) as backend:
        session = Session(backend, console)
        given, pipeline_auto = split_pipeline_auto(settings)
        with log_when_long(f"choosing the scale of {name}", console.print):
            chosen, scale_note = resolve(name, scale, backend.cluster(), given, pipeline_auto)
        check_url(chosen.train.checkpoint_dir or "")
        if scale_note:
            console.print(scale_note)
        if not pipeline_auto:  # before any data is prepared
            backend.check_workers(chosen)
            with log_when_long(f"checking {name}", console.print) as set_part:
                check_request(chosen, backend.cluster(), given, set_part)
        prepared = prepare(chosen, backend, console)
        if prepared != chosen:
            chosen = prepared.with_changes_from(find(name))
        planned = session.plan(chosen, given, pipeline_auto)
        backend.check_workers(planned.experiment)
        if pipeline_auto or chosen.pipeline.micro_batches == AUTO:
            planned = replace(planned, experiment=planned.experiment.with_changes_from(find(name)))
        if chosen.task == "custom":
            console.print(f"whether it trains as in plain PyTorch: {command('check', NAME=name)}")
        run = new_run(chosen.name)
        session.train(run, planned)
        return run


def run_experiment(chosen: Experiment, make_run: Callable[[], RunFolder], session: Session) -> RunFolder:
    """Runs a resolved experiment; ``make_run`` creates its folder, which is returned, once it is planned. Raises as
    ``start`` does."""
    chosen = prepare(chosen, session.backend, session.console)
    planned = session.plan(chosen)
    run = make_run()
    session.train(run, planned)
    return run


def resume(name: str, settings: str, launcher: str, console: Console, choice: Choice = None) -> None:
    """Resumes a run from its newest valid checkpoint, or from the chosen one; later ones are then abandoned.

    Raises SettingError for an unknown run, RunFileError for one with a damaged file, CheckpointError when it has
    finished, and when the chosen checkpoint is not there.
    """
    run = find_run(name)
    with unexpected_content(run):
        before = read_experiment_file(run.experiment)
        check_metrics(run.metrics)
    chosen = before.with_settings(settings)
    _check_unchanged(before, chosen)
    location, step = checkpoint_location(run, before), None
    checkpoints = list_checkpoints(location, lambda text: None)  # raises if there are some but none is valid
    if choice not in (None, "latest"):
        checkpoints = checkpoints_to_use(run, before, choice, console.print)[:1]
        step = checkpoints[0].step
    else:
        checkpoints = current(checkpoints)
        check_published(run, location)
    with unexpected_content(run):
        record = finished_record(run, chosen)
    if record is not None and (step is None or step >= record["steps"]):
        raise CheckpointError(how_to_go_on(run, chosen, record))
    if checkpoints and checkpoints[0].step > chosen.train.steps:
        raise CheckpointError(how_to_go_on(run, chosen, {"steps": checkpoints[0].step}))
    layers, _ = chosen.build()
    if checkpoints:
        _check_profile(before, chosen, checkpoints[0].step)
        old, new = (learning_rate(checkpoints[0].step, of.optimizer) for of in (before, chosen))
        if new != old:
            console.print(f"the learning rate continues at {new:.3g}; by the settings until now it would be {old:.3g}")
        if chosen.task == "custom":  # the settings determine any other model, and the run has them
            check_model(checkpoints[0], layers)
    with closing(select_backend(launcher)) as backend:
        session = Session(backend, console)
        backend.check_workers(chosen)
        as_planned = _with_planned_schedule(run, before, chosen)
        prepare_same(run, chosen, console)
        planned = session.plan(as_planned, settings)
        kept = {"micro_batches": planned.experiment.pipeline.micro_batches}  # so a later resume takes plan.json's too
        requested = planned.experiment.with_pipeline(chosen.pipeline.model_copy(update=kept))
        session.train(run, replace(planned, experiment=requested), resumed=True, checkpoint_step=step)


def _check_unchanged(before: Experiment, chosen: Experiment) -> None:
    """Raises SettingError when a setting differs that the training so far depends on."""
    paths = [*before.unchangeable, "optimizer.name", "train.checkpoint_dir", "train.seed", "train.init_from"]
    values = attrgetter(*paths)
    changed = [path for path, old, new in zip(paths, values(before), values(chosen), strict=True) if old != new]
    if "optimizer.name" not in changed and chosen.optimizer.state_names != before.optimizer.state_names:
        changed.append("optimizer.beta1 to or from 0, which adds or drops the momentum")
    if changed:
        raise SettingError(f"a resumed run cannot change {' and '.join(changed)}; start a new run for that")


def _check_profile(before: Experiment, chosen: Experiment, start: int) -> None:
    """Raises SettingError when the run is now asked to profile steps that it has done."""
    asked = chosen.train.profile_steps
    if asked not in (None, before.train.profile_steps) and profiled_steps(asked, chosen.train.steps).start < start:
        raise SettingError(f"train.profile_steps is {asked}, and the run resumes after step {start}; give later steps")


def _with_planned_schedule(run: RunFolder, before: Experiment, chosen: Experiment) -> Experiment:
    """Returns the experiment with the schedule that its first plan chose, if its pipeline settings are unchanged.
    Another schedule would sum gradients in another order, which changes the result."""
    if chosen.pipeline != before.pipeline or chosen.pipeline.schedule != "auto":
        return chosen
    plan = read_json(run.plan_json) or {}
    if plan.get("pipeline") != chosen.pipeline.model_dump(mode="json"):  # the driver was killed before it wrote it
        return chosen
    return chosen.with_section("pipeline", **planned_schedule(RunPlan.read(run.plan_json)))


def prepare_same(run: RunFolder, chosen: Experiment, console: Console) -> None:
    """Prepares a run's data once more. Raises DataError when they are not available now."""
    prepared = chosen.prepare_data(CACHE, console.print)
    if prepared != chosen.data:
        raise DataError(
            f"run {run.path} was trained on {chosen.data}, which is not available now, and cannot go on with "
            f"{prepared}; restore the cache or the network, and run the command again"
        )


def planned_schedule(plan: RunPlan) -> dict[str, Any]:
    """Returns the settings of the schedule that a plan chose."""
    config = plan.schedule_config
    schedule: dict[str, Any] = {"schedule": config.schedule, "virtual_stages": config.virtual_stages}
    if config.schedule == "search":  # it was found for these cells
        schedule |= {"schedule_rows": config.rows, "layers_per_cell": plan.cells}
    return schedule


def prepare(chosen: Experiment, backend: Backend, console: Console) -> Experiment:
    """Prepares the data; returns the experiment with this data, which may be a fallback, in an available precision.

    Raises DataError when no data is available, CheckpointError when ``train.init_from`` names an unsuitable run.
    """
    chosen = with_available_precision(chosen, backend.cluster(), console.print)
    chosen.check_data()
    if not chosen.data_folder(CACHE).exists():
        backend.prepare_processes(DATA_LIBRARIES)  # they import while the data is prepared
    data = chosen.prepare_data(CACHE, console.print)
    changed = chosen if data == chosen.data else chosen.with_data(data)
    if chosen.train.init_from is None:
        return changed
    source = find_run(chosen.train.init_from)
    before = read_experiment_file(source.experiment)
    checkpoint = checkpoints_to_use(source, before, None, console.print)[0]
    if differences := _model_differences(changed, before):
        raise CheckpointError(f"{source.path} has a different model: {differences}; make them equal")
    if changed.task == "custom":
        check_model(checkpoint, changed.build()[0], but_last=True)
    # workers may have another working directory
    return changed.with_section("train", init_from=str(source.path))


NO_SHAPE = (
    "classes",
    "context_length",
    "depth_scaled_init",
    "dropout",
    "label_smoothing",
    "logit_clip",
    "norm_decay",
    "residual_scale",
)
"""Fields of a model on which no parameter depends but those of its last layer."""


def _model_differences(own: Experiment, other: Experiment) -> str:
    """Returns why a run cannot start from another one's weights; empty if it can, as far as the settings tell."""
    if own.task != other.task:
        return f"its task is {other.task} there and {own.task} here"
    if own.list_length != other.list_length:
        return f"it has {other.list_length} layers there and {own.list_length} here"
    here, there = (asdict(run.model) if hasattr(run, "model") else {} for run in (own, other))
    differ = (name for name in here if name not in NO_SHAPE and here[name] != there.get(name))
    return ", ".join(f"{name} is {there.get(name)} there and {here[name]} here" for name in differ)
