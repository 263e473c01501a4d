"""The curves of one run, or of several over each other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from experiments.planning.plan_report import schedule_name
from experiments.report.figure import COLOURS, INK, new_figure, thinned
from experiments.report.page import Picture
from launch.watching.run_data import RunData
from suite.pipeline.planning.devices import GIB
from suite.pipeline.planning.plan import Alternative
from suite.training.jsonl import read_lines
from suite.training.metrics import GRAD_NORM, HFU, LOSS, LR, MFU, train_metric, units_done, units_per_s

Points = list[tuple[float, float]]


def loss_pictures(run: RunData) -> list[Picture]:
    """Returns the loss and the metric of training and of validation, with the best step marked on what decides it."""
    pictures = []
    for name in dict.fromkeys(("loss", run.metric)):
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
    axis.legend(frameon=False, fontsize=8)
    what = f"loss per {run.experiment.unit.removesuffix('s')}" if name == "loss" else _in_words(name)
    caption = f"{what[0].upper()}{what[1:]} of training" + (" and of held-out data." if validation else ".")
    return Picture("loss" if name == "loss" else "metric", figure, caption, wide=False)


def optimizer_pictures(run: RunData) -> list[Picture]:
    """Returns the learning rate and the gradient norm."""
    norms = "Gradient norm of each step, over all stages, before clipping."
    return [
        *_one("lr", run.points(LR), "learning rate", "Learning rate of each step."),
        *_one("grad-norm", run.points(GRAD_NORM), "gradient norm", norms),
    ]


def speed_and_memory_pictures(run: RunData) -> list[Picture]:
    """Returns units per second, the utilization of the devices where it is known, and the memory of each worker."""
    unit, mfu, hfu = run.experiment.unit, run.points(MFU), run.points(HFU)
    caption = f"{unit.capitalize()} per second of each step."
    pictures = _one("throughput", run.points(units_per_s(unit)), f"{unit}/s", caption)
    if len(mfu) > 1:
        figure, axis = new_figure("step", "share of the device's peak, %")
        for name, points in (("MFU", mfu), ("HFU", hfu if hfu != mfu else [])):  # equal without recomputation
            if points:
                steps, values = thinned(points)
                axis.plot(steps, [100 * value for value in values], linewidth=1.2, label=name)
        axis.set_ylim(bottom=0)
        axis.legend(frameon=False, fontsize=8)
        caption = "Model FLOPs utilization (MFU); HFU also counts recomputed operations."
        pictures.append(Picture("mfu", figure, caption, wide=False))
    curves = {}
    for path in sorted(run.run.system.glob("*.jsonl")):
        lines = read_lines(path)
        points = [(line["step"], memory_of(line) / GIB) for line in lines if memory_of(line)]
        if len(points) > 1:
            curves[worker_name(path.stem, run)] = points
    if curves:
        figure, axis = new_figure("step", "GiB")
        for name, points in curves.items():
            axis.plot(*zip(*points, strict=True), linewidth=1.2, label=name)
        axis.set_ylim(bottom=0)
        if len(curves) <= len(COLOURS):
            axis.legend(frameon=False, fontsize=8, ncols=2)
        pictures.append(Picture("memory", figure, "Memory of each worker, sampled every ten seconds.", wide=False))
    return pictures


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
    fastest = math.inf
    front: Points = []
    for each in sorted(fitting, key=lambda each: (each["peak_bytes"], each["step_s"])):
        memory, seconds = each["peak_bytes"] / GIB, each["step_s"]
        if seconds < fastest:
            fastest = seconds
            front.append((memory, seconds))
        name = Alternative(each["schedule"], each["virtual_stages"])
        style = {"marker": "*", "markersize": 13} if each["chosen"] else {"marker": "o", "markersize": 5}
        axis.plot(memory, seconds, linestyle="", label=schedule_name(name), **style)
    axis.step(*zip(*front, strict=True), where="post", linewidth=1, color=INK, zorder=0)
    axis.set_xlim(0, 1.1 * max(each["peak_bytes"] for each in fitting) / GIB)
    axis.xaxis.set_major_formatter("{x:g}")
    axis.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    caption = "Planned step and memory of each schedule that fits; the star is the run's. None is below the line."
    return [Picture("schedules", figure, caption)]


def overlays(runs: Sequence[RunData], labels: Sequence[str]) -> list[Picture]:
    """Returns the curves of several runs over each other, by step and by units."""
    first = runs[0]
    unit, metric = first.experiment.unit, first.metric
    against, valid = units_done(unit), f"validation: {_in_words(metric)}"
    wanted = [
        ("loss", "step", "training loss", [run.points(LOSS) for run in runs]),
        ("loss-units", unit, "training loss", [run.points(LOSS, against) for run in runs]),
        ("valid", "step", valid, [run.valid_points(metric) for run in runs]),
        ("valid-units", unit, valid, [run.valid_points(metric, against) for run in runs]),
        ("grad-norm", "step", "gradient norm", [run.points(GRAD_NORM) for run in runs]),
        ("throughput", "step", f"{unit}/s", [run.points(units_per_s(unit)) for run in runs]),
    ]
    pictures = []
    for name, xlabel, ylabel, curves in wanted:
        if all(len(points) < 2 for points in curves):
            continue
        figure, axis = new_figure(xlabel, ylabel)
        for at, (points, label) in enumerate(zip(curves, labels, strict=True)):
            if points:
                marker = {"marker": "o", "markersize": 4} if name.startswith("valid") else {}
                axis.plot(*thinned(points), linewidth=1.3, color=COLOURS[at % len(COLOURS)], label=label, **marker)
        axis.legend(frameon=False, fontsize=8)
        pictures.append(Picture(name, figure, f"{ylabel.capitalize()} by {xlabel}.", wide=False))
    return pictures


def _one(name: str, points: Points, ylabel: str, caption: str) -> list[Picture]:
    """Returns a picture of one curve by step; none with fewer than two points."""
    if len(points) < 2:
        return []
    figure, axis = new_figure("step", ylabel)
    axis.plot(*thinned(points), linewidth=1.3)
    return [Picture(name, figure, caption, wide=False)]


def _in_words(metric: str) -> str:
    return {"nll": "nats per token"}.get(metric, metric)
