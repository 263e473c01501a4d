"""Plots pipeline timelines: one row per stage, one colour per kind of action, measured above simulated."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.report.figure import INK, png
from suite.pipeline.schedule.timeline import Timeline
from suite.training.trace import KIND_NAMES

COLOURS = {"F": "#4c78a8", "R": "#f2b134", "I": "#88d27a", "B": "#54a24b", "W": "#9ecae9", "U": "#b279a2"}
_IDLE = "#8c8c8c33"
_LEGIBLE = 0.012
"""Actions shorter than this share of a step get no label."""

WIDTH = 10.0
"""Inches; the labels fit the width of a page."""

_MOST_VECTORS = 4000
"""With more actions the bars are drawn as pixels: an SVG of them would take megabytes."""


def draw(rows: Sequence[tuple[str, Timeline]], path: Path, title: str) -> None:
    path.write_bytes(png(timeline_figure(rows, title)))


def timeline_figure(rows: Sequence[tuple[str, Timeline]], title: str) -> Any:
    """Returns a matplotlib ``Figure`` with one panel per (title, timeline), stacked, with one time axis."""
    # not pyplot, which keeps its figures for the whole process: several runs may draw at once
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    stages = max(len(timeline.rows) for _, timeline in rows)
    longest = max(timeline.seconds for _, timeline in rows)
    actions = sum(len(row) for _, timeline in rows for row in timeline.rows)
    height = 1.1 + len(rows) * (0.75 + 0.42 * stages)
    figure = Figure(figsize=(WIDTH, height))
    axes = figure.subplots(len(rows), 1, sharex=True, squeeze=False)
    for axis, (name, timeline) in zip(axes[:, 0], rows, strict=True):
        _panel(axis, timeline, longest, rasterized=actions > _MOST_VECTORS)
        heading = f"{name}: {timeline.seconds:.3f} s per step, idle {timeline.bubble:.1%}"
        axis.set_title(heading, loc="left", fontsize=10)
    axes[-1, 0].set_xlabel("seconds")
    seen = {span.kind for _, timeline in rows for row in timeline.rows for span in row}
    drawn = [kind for kind in COLOURS if kind in seen]
    handles = [Patch(color=COLOURS[kind], label=KIND_NAMES[kind]) for kind in drawn] + [
        Patch(color=_IDLE, label="idle")
    ]
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    figure.legend(handles=handles, loc="upper right", ncols=6, frameon=False, fontsize=9)
    figure.tight_layout(rect=(0, 0, 1, 0.97))
    return figure


def _panel(axis: Any, timeline: Timeline, longest: float, rasterized: bool) -> None:
    for stage, row in enumerate(timeline.rows):
        axis.barh(stage, timeline.seconds, height=0.8, color=_IDLE)
        for span in row:
            place = {"left": span.start, "height": 0.8, "rasterized": rasterized}
            axis.barh(stage, span.seconds, **place, color=COLOURS[span.kind], edgecolor="white", linewidth=0.4)
            if span.seconds > _LEGIBLE * longest:
                middle = span.start + span.seconds / 2
                axis.text(middle, stage, str(span), ha="center", va="center", fontsize=7, color="#101010")
    axis.set_yticks(range(len(timeline.rows)), [f"stage {k}" for k in range(len(timeline.rows))])
    axis.tick_params(colors=INK)
    axis.set_xlim(0, longest)
    axis.invert_yaxis()
    axis.spines[["top", "right"]].set_visible(False)
