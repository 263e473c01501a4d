"""One run from name to summary: resolve, prepare the data, make the folder, start the workers, tell what came of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments.experiment import Experiment
from experiments.picture import draw
from experiments.planned import Planned, in_figures
from experiments.planning import make, row_faults, shrunk_to
from experiments.registry import find, read_experiment, resolve
from experiments.scale_choice import Asked
from experiments.scales import with_changes
from experiments.tasks import data_folder, prepare_data, workload
from launch import interrupts
from launch.checkpoints import check_unused, place_of, place_of_run
from launch.follow import Follower
from launch.progress import told_when_long
from launch.publishing import publish
from launch.runs import CACHE, RunFolder, find_run, held, how_to_go_on, how_to_sync, new_run
from launch.site import Site, site_of
from launch.step_check import StepCheck
from launch.supervise import Supervisor
from launch.syncing import unsent
from launch.worker import Job, speaker, threads_of
from suite.errors import CheckpointError, DataError, PlacementError, PlanError, SettingError
from suite.pipeline.timeline import text
from suite.training.checkpoint import list_checkpoints
from suite.training.checkpoint.object_store import check_url
from suite.training.trace import perfetto, read_traces


def start(name: str, scale: Asked, settings: str, launcher: str, console: Console) -> None:
    """Runs an experiment from nothing. Raises a SuiteError for whatever the user can mend."""
    find(name)  # an unknown name is told before anything is looked for
    site = site_of(launcher)
    with told_when_long(f"choosing the scale of {name}", console.print):
        chosen, shrunk = resolve(name, scale, site.cluster(), settings)
    check_url(chosen.train.checkpoints or "")
    console.print(shrunk)
    if wrong := row_faults(workload(chosen)):  # before any data is prepared
        raise PlanError(wrong)
    prepared = _prepared(chosen, console)
    if prepared != chosen:
        chosen = with_changes(find(name), prepared)
    planned = _planned(chosen, settings, site, console)
    _train(new_run(name), chosen, planned, False, site, console)


def run_experiment(chosen: Experiment, run: Callable[[], RunFolder], launcher: str, console: Console) -> None:
    """Runs an experiment as it is, in a folder made once it is planned. Raises a SuiteError as ``start`` does."""
    chosen, site = _prepared(chosen, console), site_of(launcher)
    planned = _planned(chosen, "", site, console)
    _train(run(), chosen, planned, False, site, console)


def resume(asked: str, settings: str, launcher: str, console: Console) -> None:
    """Takes a run up again. Raises SettingError for an unknown run, CheckpointError when it is finished already."""
    run = find_run(asked)
    before = read_experiment(run.experiment.read_text())
    chosen = before.with_settings(settings)
    changed = [section for section in before.fixed if getattr(chosen, section) != getattr(before, section)]
    if chosen.optimizer.name != before.optimizer.name:
        changed.append("optimizer.name")
    if chosen.train.checkpoints != before.train.checkpoints:
        changed.append("train.checkpoints")
    if changed:
        raise SettingError(f"a resumed run keeps its {' and '.join(changed)}; start a new run to change them")
    if _is_finished(run, chosen):
        raise CheckpointError(
            f"run {run.path} has done all its {chosen.train.steps} steps; "
            f'to train on: {how_to_go_on(run)} SET="train.steps={2 * chosen.train.steps}"'
        )
    list_checkpoints(place_of(run, before), lambda text: None)  # raises where there are some and none can be used
    prepared = prepare_data(chosen, CACHE, _say(console))
    if prepared != chosen.data:
        raise DataError(
            f"run {run.path} was trained on {chosen.data}, which cannot be had now; it is not taken up on "
            f"{prepared}. Restore the cache or the network and resume again"
        )
    site = site_of(launcher)
    planned = _planned(_as_walked(run, before, chosen), settings, site, console)
    _train(run, chosen, planned, True, site, console)


def _as_walked(run: RunFolder, before: Experiment, chosen: Experiment) -> Experiment:
    """Returns the experiment with the schedule that the plan chose for it, where its pipeline is what it was: another
    one would add gradients in another order, and the run would not be the one it began as."""
    if chosen.pipeline != before.pipeline or chosen.pipeline.schedule != "auto" or not run.plan_record.exists():
        return chosen
    plan = json.loads(run.plan_record.read_text())
    if plan.get("pipeline") != chosen.pipeline.model_dump(mode="json"):  # its driver was killed before it was written
        return chosen
    walked = {"schedule": plan["schedule"], "turns": plan["turns"]}
    return chosen.model_copy(update={"pipeline": chosen.pipeline.model_copy(update=walked)})


def _prepared(chosen: Experiment, console: Console) -> Experiment:
    """Prepares the data, and returns the experiment on what was prepared: other data where this cannot be had.

    Raises DataError when nothing can, CheckpointError when it is to begin with a run that was never trained.
    """
    data = prepare_data(chosen, CACHE, _say(console))
    changed = chosen if data == chosen.data else chosen.with_data(data)
    source = getattr(chosen.train, "start_from", None)
    if source is None:
        return changed
    if not list_checkpoints(place_of_run(Path(source)), _say(console)):
        raise CheckpointError(f"{source} has no whole checkpoint; give train.start_from a run that was trained")
    before = read_experiment((Path(source) / "experiment.toml").read_text())
    own, other = (asdict(one.model) for one in (changed, before))  # type: ignore[attr-defined]
    free = ("classes", "label_smoothing", "norm_decay")
    differ = [name for name in own if name not in free and own[name] != other.get(name)]
    if differ:
        told = ", ".join(f"{name} is {other.get(name)} there and {own[name]} here" for name in differ)
        raise CheckpointError(f"{source} is of another model: {told}; make them the same")
    # workers may have another current folder
    train = changed.train.model_copy(update={"start_from": str(Path(source).resolve())})
    return changed.model_copy(update={"train": train})


def _data_of(chosen: Experiment) -> Path:
    return data_folder(chosen, CACHE).resolve()


def _train(run: RunFolder, chosen: Experiment, planned: Planned, resumed: bool, site: Site, console: Console) -> None:
    advice = interrupts.advised(lambda: _after_interrupt(run, chosen), lambda: f"the run is done: {run.path}")
    with held(run.path), advice:
        console.print(f"folder: {run.path}")
        course = Course(run, chosen, planned, resumed, site, console)
        try:
            _launch(course, site, console)
        finally:
            if not interrupts.received():
                _show_trace(run, course.planned, console)
        publish(run, "end", _say(console))
        _summarise(run, console)


def _is_finished(run: RunFolder, chosen: Experiment) -> bool:
    return run.record.exists() and bool(json.loads(run.record.read_text())["steps"] >= chosen.train.steps)


def _after_interrupt(run: RunFolder, chosen: Experiment) -> str:
    """Returns how to go on with a run that was interrupted."""
    if not run.experiment.exists():
        return "nothing was saved; the same command starts it again"
    if _is_finished(run, chosen):
        return f"the run is done: {run.path}"
    if chosen.train.checkpoints is not None:
        return f"{how_to_go_on(run)} goes on from its newest checkpoint, or from step 0 where it has none yet"
    folders = [path.parent.name for path in run.checkpoints.glob("*/manifest.json")]
    steps = [int(name) for name in folders if name.isdecimal()]
    start = f"the checkpoint of step {max(steps)}" if steps else "step 0, as it has no checkpoint yet"
    return f"{how_to_go_on(run)} goes on from {start}"


class Course:
    """What a run is now: the experiment as it was asked for, and its plan, which lost devices may change."""

    def __init__(
        self, run: RunFolder, chosen: Experiment, planned: Planned, resumed: bool, site: Site, console: Console
    ) -> None:
        self._asked, self._first = chosen, planned
        self.experiment, self.planned, self.job = chosen, planned, _job(run, chosen, planned, resumed)
        self._site, self._console = site, console

    def fit(self, devices: int) -> tuple[Job, Experiment]:
        """Returns the job that needs no more devices and is most like what was asked for.

        Raises PlacementError where none fits.
        """
        planned = self._first
        for experiment in shrunk_to(self._asked, devices):
            try:
                if experiment != self._asked:
                    planned = _planned(experiment, "", self._site, self._console)
            except PlanError:
                continue
            if experiment != self.experiment:
                self.experiment, self.planned = experiment, planned
                self.job = replace(_job(self.job.run, experiment, planned, True), shrunk=experiment != self._asked)
                if self.job.shrunk:
                    self.job.run.shrunk.write_text(experiment.to_toml())
            return self.job, experiment
        raise PlacementError(
            f"{devices} devices are left, and no plan of {self._asked.name} fits them; when more are back, "
            f"`{how_to_go_on(self.job.run)}` goes on from the newest checkpoint"
        )

    def keep_plan(self) -> None:
        """Writes the plan of what was asked for, beside it in the run's folder."""
        run, plan = self.job.run, self._first
        run.plan.write_text("\n".join(plan.lines()) + "\n")
        record = plan.as_dict() | {"pipeline": self._asked.pipeline.model_dump(mode="json")}
        run.plan_record.write_text(json.dumps(record, indent=1) + "\n")


def _job(run: RunFolder, chosen: Experiment, planned: Planned, resumed: bool) -> Job:
    plan = planned.plan
    return Job(
        run.path, _data_of(chosen), plan.cells, plan.recipe, planned.cluster.kind == "gpu", resumed,
        step_s=plan.timeline.seconds,
    )  # fmt: skip


def _launch(course: Course, site: Site, console: Console) -> None:
    """Runs the workers to the end. What was resolved and planned becomes the run's record of itself only once they are
    placed: a resume that cannot start leaves the old one."""
    job, chosen = course.job, course.experiment
    job.draft.write_text(chosen.to_toml())
    if not job.resume:
        check_unused(place_of(job.run, chosen))
        job.draft.rename(job.run.experiment)
        course.keep_plan()
    check = StepCheck(job.run, lambda: course.planned, speaker(job.run.messages))
    try:
        with (
            Follower(job.run, chosen.train.steps, chosen.unit, console, check.step),
            site.started(job, course.planned.placement) as workers,
        ):
            Supervisor(job, chosen, workers, course.fit, speaker(job.run.messages)).run()
    finally:
        if not job.draft.exists():
            course.keep_plan()


def _planned(chosen: Experiment, settings: str, site: Site, console: Console) -> Planned:
    """Plans a run on the devices there are and prints the plan. Raises PlanError when it does not fit."""
    workers, threads = chosen.pipeline.stages * chosen.pipeline.replicas, threads_of(chosen)
    notes = [f"{chosen.name} at scale {chosen.scale}; {workers} workers, {threads} threads each"]
    prices = site.pricer(CACHE / "costs", _data_of(chosen), _say(console))
    with told_when_long(f"planning {chosen.name}", console.print) as tell:
        planned = make(workload(chosen, _data_of(chosen)), site.cluster(), prices, tuple(notes), settings, tell)
    for line in planned.lines():
        console.print(line)
    return planned


def _show_trace(run: RunFolder, planned: Planned, console: Console) -> None:
    """Writes the trace for Perfetto and the picture of the middle traced step, and prints that step as text."""
    traces = read_traces(run.traces)
    if not traces:
        console.print('no step was traced: the first two after a start are not, unless SET="trace=true"')
        return
    run.trace.write_text(json.dumps(perfetto(traces)))
    first = sorted((trace for trace in traces if trace.replica == 0), key=lambda trace: trace.timeline.seconds)
    middle = first[len(first) // 2]
    measured, simulated = middle.timeline, planned.plan.timeline
    title = f"{planned.work.name}, step {middle.step + 1}"
    draw([("measured", measured), (planned.kind, simulated)], run.timeline, title)
    console.print(f"step {middle.step + 1}, measured: {measured.seconds:.3f} s, idle {measured.bubble:.1%}")
    console.print(text(measured))
    console.print(f"{planned.kind}: {simulated.seconds:.3f} s, idle {simulated.bubble:.1%}")
    console.print(text(simulated))
    console.print(f"trace: {run.trace} (opens in ui.perfetto.dev), picture: {run.timeline}")


def _summarise(run: RunFolder, console: Console) -> None:
    record = json.loads(run.record.read_text())
    unit = record["unit"]
    hint = f", recorded offline; to upload it: {how_to_sync(run)}" if unsent(run) else ""
    lines = [
        f"done: {record['steps']} steps, {record[unit]:,} {unit} in {record['seconds']:.0f} s "
        f"({in_figures(record[f'{unit}_per_second'])} {unit}/s, {record['threads']} threads a worker)",
        f"loss {record['loss_first']:.3f} -> {record['loss_last']:.3f}",
        _score(record),
        f"peak memory of all workers: {record['peak_memory_bytes'] / 2**30:.2f} GiB",
        f"wandb run: {record['wandb_run'] or 'none'}{hint}",
        f"folder: {run.path}",
    ]
    for line in lines:
        console.print(line)


def _score(record: dict[str, Any]) -> str:
    """Returns how the model did on held-out data, beside what takes no model."""
    if record["measure"] == "accuracy":
        return (
            f"test accuracy: {record['valid_accuracy']:.2%}; always the commonest class: "
            f"{record['baseline_accuracy']:.2%}"
        )
    gain = record["baseline_nll"] - record["valid_nll"]
    than = f"{gain:.3f} below it" if gain > 0 else f"{-gain:.3f} above it: nothing was learned beyond frequencies"
    return (
        f"validation: {record['valid_nll']:.3f} nats a token; the best predictor without context: "
        f"{record['baseline_nll']:.3f} (unigram entropy of the same tokens); {than}"
    )


def _say(console: Console) -> Callable[[str], None]:
    return lambda text: console.print(text)
