"""The curves of a run."""

from __future__ import annotations

from typing import Any

from experiments.planning.report import schedule_name
from experiments.report.figure import COLOURS, INK, new_figure, thinned
from experiments.report.page import Picture
from launch.watching.run_data import RunData
from suite.pipeline.planning.devices import GIB
from suite.training.jsonl import read_lines
from suite.training.metrics import GRAD_NORM, HFU, LOSS, LR, MFU, STEP, train_metric, units_per_s

Points = list[tuple[float, float]]


def loss_pictures(run: RunData) -> list[Picture]:
    """Returns the loss and each metric of training and of validation, with the best step marked on what decides it."""
    pictures = []
    for name in dict.fromkeys(("loss", *run.metrics)):
        training, validation = run.points(train_metric(name)), run.valid_points(name)
        is_new = name == "loss" or training != run.points(LOSS)
        if validation or (is_new and len(training) > 1):
            pictures.append(_curves(run, name, training, validation))
    return pictures


def _curves(run: RunData, name: str, training: Points, validation: Points) -> Picture:
    """Returns one metric of training and of validation."""
    figure, axis = new_figure("step", _in_words(name))
    if len(training) > 1:
        axis.plot(*thinned(training), linewidth=1, color=COLOURS[7], label="training")
    if validation:
        line = {"marker": "o", "markersize": 4, "linewidth": 1.4, "color": COLOURS[0]}
        axis.plot(*zip(*validation, strict=True), label="validation", **line)
    if run.best is not None and name == run.experiment.criterion.name:
        star = {"marker": "*", "markersize": 13, "linestyle": "", "color": COLOURS[1]}
        axis.plot(*run.best, label=f"best, step {run.best[0]}", **star)
    baseline = run.record.get(f"baseline_{name}")
    if baseline is not None:
        axis.axhline(baseline, color=INK, linewidth=1, linestyle="--", label="baseline")
    _mark_attempts(axis, run)
    axis.legend(frameon=False, fontsize=8)
    what = f"loss per {run.experiment.unit.removesuffix('s')}" if name == "loss" else _in_words(name)
    caption = f"{what[0].upper()}{what[1:]} of training" + (" and of held-out data." if validation else ".")
    return Picture("loss" if name == "loss" else "metric", figure, caption, wide=False)


def optimizer_pictures(run: RunData) -> list[Picture]:
    """Returns the learning rate and the gradient norm."""
    norms = "Gradient norm of each step, over all stages, before clipping."
    return [
        *_drawn("lr", ("step", "learning rate"), {"": run.points(LR)}, "Learning rate of each step.", run),
        *_drawn("grad-norm", ("step", "gradient norm"), {"": run.points(GRAD_NORM)}, norms, run),
    ]


def speed_and_memory_pictures(run: RunData) -> list[Picture]:
    """Returns units per second, the utilization of the devices where it is known, and the memory of each worker."""
    unit, memory = run.experiment.unit, {}
    metrics = {"MFU": MFU, "HFU": HFU}
    shares = {name: [(step, 100 * value) for step, value in run.points(metric)] for name, metric in metrics.items()}
    if shares["HFU"] == shares["MFU"]:  # equal without recomputation
        del shares["HFU"]
    for path in sorted(run.run.system.glob("*.jsonl")):
        lines = read_lines(path)
        memory[worker_name(path.stem, run)] = [(line[STEP], memory_of(line) / GIB) for line in lines if memory_of(line)]
    speed = f"{unit.capitalize()} per second of each step."
    sampled = "Memory of each worker, sampled every ten seconds."
    of_peak = "Model FLOPs utilization (MFU); HFU also counts recomputed operations."
    return [
        *_drawn("throughput", ("step", f"{unit}/s"), {"": run.points(units_per_s(unit))}, speed, run),
        *_drawn("mfu", ("step", "share of the device's peak, %"), shares, of_peak, run),
        *_drawn("memory", ("step", "GiB"), memory, sampled, run),
    ]


def memory_of(line: dict[str, Any]) -> float:
    """Returns the bytes that a worker's line of system metrics reports: of the GPU, or resident."""
    return float(line.get("gpu_allocated_bytes") or line.get("resident_bytes") or 0.0)


def worker_name(stem: str, run: RunData) -> str:
    """Returns ``stage 2``, or ``replica 1, stage 2``, of the file name ``1-2``."""
    replica, _, stage = stem.partition("-")
    return f"stage {stage}" if run.experiment.pipeline.replicas == 1 else f"replica {replica}, stage {stage}"


def schedule_pictures(run: RunData) -> list[Picture]:
    """Returns a picture of the step and the memory of each schedule that fits; none where the plan had no choice."""
    fitting = [each for each in run.plan.get("schedules", []) if "fault" not in each]
    if len(fitting) < 2:
        return []
    figure, axis = new_figure("GiB of the largest stage", "step, s", size=(7.0, 3.4))
    for each in sorted(fitting, key=lambda each: (each["peak_bytes"], each["step_s"])):
        name = schedule_name(each["schedule"], each["virtual_stages"])
        style = {"marker": "*", "markersize": 13} if each["chosen"] else {"marker": "o", "markersize": 5}
        axis.plot(each["peak_bytes"] / GIB, each["step_s"], linestyle="", label=name, **style)
    axis.set_xlim(left=0)
    axis.xaxis.set_major_formatter("{x:g}")
    axis.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return [Picture("schedules", figure, "Planned step and memory of each schedule that fits; the star is the run's.")]


def _drawn(name: str, axes: tuple[str, str], curves: dict[str, Points], caption: str, run: RunData) -> list[Picture]:
    """Returns a picture of curves by their labels, with the attempts of ``run``; none without one of two points."""
    if all(len(points) < 2 for points in curves.values()):
        return []
    figure, axis = new_figure(*axes)
    for at, (label, points) in enumerate(curves.items()):
        if points:
            axis.plot(*thinned(points), linewidth=1.3, color=COLOURS[at % len(COLOURS)], label=label)
    _mark_attempts(axis, run)
    if 1 < len(curves) <= 2 * len(COLOURS):
        axis.legend(frameon=False, fontsize=8)
    return [Picture(name, figure, caption, wide=False)]


def _mark_attempts(axis: Any, run: RunData) -> None:
    """Draws a line at each step from which an attempt resumed, and at each where one failed."""
    resumed = [each["start"] for each in run.attempts[1:] if "start" in each]
    failed = [each["reached"] for each in run.attempts if each.get("outcome") == "failed" and "reached" in each]
    for steps, label, style in ((resumed, "resumed", ":"), (failed, "failed", "--")):
        for step in dict.fromkeys(steps):
            name = label if step == steps[0] else None
            axis.axvline(step, color=COLOURS[3], linewidth=1, linestyle=style, label=name)


def _in_words(metric: str) -> str:
    return {"nll": "nats per token"}.get(metric, metric)
