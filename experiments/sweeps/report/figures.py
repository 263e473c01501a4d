"""The figures of sweeps: means with margins over seeds, the paper's figure, losses, and statistics of layers."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.report.figure import INK, new_figure, thinned
from experiments.report.page import Picture
from experiments.sweeps.report.margins import t_margin
from experiments.sweeps.report.results import BILINGUAL_MODELS, CHRF, NLL, Results
from experiments.sweeps.report.score_tables import Group
from experiments.sweeps.report.verdicts import above_baseline
from suite.evaluation.scores import MEASURES

SIZE = (10.0, 4.8)
"""Inches."""


def score_pictures(results: Results, groups: Sequence[Group]) -> list[Picture]:
    """Returns test NLL and chrF of the models of each group, one colour per model."""
    pictures = []
    for metric in (NLL, CHRF) if groups and results.runs else ():
        name = MEASURES[metric.name]
        points: dict[str, list[tuple[int, float, float]]] = {}
        for place, group in enumerate(groups):
            for model, label, languages in group.models:
                series = BILINGUAL_MODELS if label == BILINGUAL_MODELS else model
                if values := results.means(label, languages, metric):
                    points.setdefault(series, []).append((place, statistics.fmean(values), t_margin(values)))
        figure, axis = new_figure("", name, SIZE)
        draw_points(axis, points)
        axis.set_xticks(range(len(groups)), [group.where.replace(": ", "\n") for group in groups])
        if points:
            figure.legend(loc="outside right upper", frameon=False, fontsize=8)
        caption = f"{name}: mean and 95% interval over seeds (measured)."
        if BILINGUAL_MODELS in points:
            caption += " Bilingual models: of the languages that have one."
        pictures.append(Picture(f"scores-{metric.name}", figure, caption))
    return pictures


def draw_points(axis: Any, models: Mapping[str, Sequence[tuple[float, float, float]]]) -> None:
    """Draws the (place, value, margin) of each model that has any, those of one place beside each other."""
    for at, (model, points) in enumerate(models.items()):
        if points:
            places, values, margins = zip(*points, strict=True)
            moved = [place + 0.06 * (at - (len(models) - 1) / 2) for place in places]
            axis.errorbar(moved, values, yerr=margins, label=model, fmt="o", capsize=3)


def against_bilingual(results: Results) -> list[Picture]:
    """Returns the paper's figure: chrF above the bilingual baseline of each language, those with most training pairs
    first, one colour per model."""
    if not (codes := results.baselines):
        return []
    figure, axis = new_figure("language, by training pairs", "chrF above the bilingual baseline", SIZE)
    points = {
        label: [
            (place, gain.value, gain.margin or 0.0)
            for place, code in enumerate(codes)
            if (gain := above_baseline(results, label, code)) is not None
        ]
        for label in results.multilingual_labels
    }
    draw_points(axis, points)
    axis.axhline(0, color=INK, linewidth=1, linestyle="--", label="bilingual")
    axis.set_xticks(range(len(codes)), [f"{code}\n{results.train_pairs(code):,}" for code in codes])
    axis.set_xlim(-0.5, len(codes) - 0.5)
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    caption = (
        "chrF above the bilingual baseline by language, mean of both directions and all seeds, with margins "
        "computed as in the findings, for each language alone (measured)."
    )
    return [Picture("bilingual", figure, caption)]


def loss_curves(results: Results) -> list[Picture]:
    """Returns the training loss of every run against the tokens seen, one colour per label."""
    if not results.runs:
        return []
    figure, axis = new_figure("target tokens seen", "training loss, nats per token (label-smoothed)", SIZE)
    colours: dict[str, Any] = {}
    for run in results.runs:
        is_bilingual = len(run.experiment.text.languages or ()) == 1
        label, style = run.member.label, {"linewidth": 1, "linestyle": "--" if is_bilingual else "-"}
        own = {"color": colours[label]} if label in colours else {"label": label}
        (drawn,) = axis.plot(*thinned(run.losses), **style, **own)
        colours.setdefault(label, drawn.get_color())
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    caption = "Training loss by target tokens; every seed is a line, dashed for bilingual models."
    return [Picture("loss", figure, caption)]


def layer_curves(lines: Sequence[tuple[str, dict[str, Any]]]) -> list[Picture]:
    """Returns a figure of each statistic of the layers, a line a run of (label, a line of layers.jsonl)."""
    if not lines:
        return []
    curves = {
        "change_rms": ("change by the update", "log", "Change of each layer's output by one update, same input"),
        "output_rms": ("size of the output", "log", "Root mean square of each layer's output"),
        "norms": ("norm of the layer's gradient", "log", "Gradient norm of each layer"),
        "kurtosis": ("excess kurtosis", "symlog", "Excess kurtosis of each layer's output"),
    }
    steps = " and ".join(map(str, sorted({line["step"] for _, line in lines})))
    pictures = []
    for name, (heading, scale, caption) in curves.items():
        figure, axis = new_figure("layer of the list", heading, SIZE)
        for label, line in lines:
            values = [float("nan") if value is None else value for value in line[name]]
            axis.plot([at / (len(values) - 1) for at in range(len(values))], values, linewidth=1, label=label)
        axis.set_yscale(scale)
        axis.set_xticks([0, 0.5, 1], ["source embedding, encoder", "target embedding, decoder", "head"])
        axis.legend(frameon=False, fontsize=7, ncols=2)
        pictures.append(Picture(name, figure, f"{caption}, step {steps} (measured)."))
    return pictures
