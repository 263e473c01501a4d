"""The figures of a sweep on text: the paper's figure, and the loss curves."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from experiments.report.figure import INK, new_figure, thinned
from experiments.report.page import Picture
from experiments.sweeps.report.margins import t_margin
from experiments.sweeps.report.results import BILINGUAL_MODELS, CHRF, NLL, Results, Run
from experiments.sweeps.report.verdicts import above_baseline
from suite.evaluation.scores import MEASURES, THIRDS

SIZE = (10.0, 4.8)
"""Inches."""


def by_third_pictures(results: Results) -> list[Picture]:
    """Returns test NLL and chrF by resource third, a line a model, with intervals over seeds."""
    labels = [*results.multilingual_labels, *([BILINGUAL_MODELS] if results.baselines else [])]
    pictures = []
    for metric in (NLL, CHRF):
        name = MEASURES[metric.name]
        figure, axis = new_figure("resource third, by training pairs", name)
        for at, label in enumerate(labels):
            shift = 0.04 * (at - (len(labels) - 1) / 2)
            columns = [results.means(label, results.in_third(third), metric) for third in THIRDS]
            points = [
                (place + shift, statistics.fmean(values), t_margin(values))
                for place, values in enumerate(columns)
                if values
            ]
            draw_with_margins(axis, label, points, "--" if label == BILINGUAL_MODELS else "-")
        axis.set_xticks(range(len(THIRDS)), [f"{third}\n{', '.join(results.in_third(third))}" for third in THIRDS])
        axis.legend(frameon=False, fontsize=8)
        caption = f"{name} by resource third: mean and 95% interval over seeds (measured)."
        pictures.append(Picture(f"thirds-{metric.name}", figure, caption, wide=False))
    return pictures


def draw_with_margins(
    axis: Any, label: str, points: Sequence[tuple[float, float, float]], linestyle: str = "-"
) -> None:
    """Draws a line through points (place, value, margin); nothing without points."""
    if points:
        places, values, margins = zip(*points, strict=True)
        style = {"marker": "o", "capsize": 3, "linewidth": 1.2, "linestyle": linestyle}
        axis.errorbar(places, values, yerr=margins, label=label, **style)


def against_bilingual(results: Results) -> list[Picture]:
    """Returns the paper's figure: chrF above the bilingual baseline of each language, those with most training pairs
    first, one colour per model."""
    codes, labels = results.baselines, results.multilingual_labels
    if not codes:
        return []
    figure, axis = new_figure("language, by training pairs", "chrF above the bilingual baseline", SIZE)
    for at, label in enumerate(labels):
        shift = 0.06 * (at - (len(labels) - 1) / 2)
        above = [(place + shift, above_baseline(results, label, code)) for place, code in enumerate(codes)]
        points = [(place, gain.value, gain.margin or 0.0) for place, gain in above if gain is not None]
        draw_with_margins(axis, label, points)
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
    caption = "Training loss by target tokens; every seed is a line, dashed for bilingual models."
    return _curves(results.runs, "target tokens seen", "training loss, nats per token (label-smoothed)", caption)


def _curves(runs: Sequence[Run], across: str, up: str, caption: str) -> list[Picture]:
    if not runs:
        return []
    figure, axis = new_figure(across, up, SIZE)
    colours: dict[str, Any] = {}
    for run in runs:
        label, (places, losses) = run.member.label, thinned(run.losses)
        (drawn,) = axis.plot(
            places,
            losses,
            linewidth=1,
            linestyle="--" if run.is_bilingual else "-",
            color=colours.get(label),
            label=None if label in colours else label,
        )
        colours.setdefault(label, drawn.get_color())
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)
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
    pictures = []
    for name, (heading, scale, caption) in curves.items():
        figure, axis = new_figure("layer of the list", heading, SIZE)
        for label, line in lines:
            values = [float("nan") if value is None else value for value in line[name]]
            places = [at / (len(values) - 1) for at in range(len(values))]
            axis.plot(places, values, linewidth=1, label=label)
        axis.set_yscale(scale)
        axis.set_xticks([0, 0.5, 1], ["source embedding, encoder", "target embedding, decoder", "head"])
        axis.legend(frameon=False, fontsize=7, ncols=2)
        steps = sorted({line["step"] for _, line in lines})
        pictures.append(Picture(name, figure, f"{caption}, step {' and '.join(map(str, steps))} (measured)."))
    return pictures
