"""The look of all figures: small vector graphics that are legible on a light and on a dark page.

Text, axes and grid are drawn in ``INK``, which becomes the text colour of the page in an SVG, and stays dark on the
white ground of a PNG. Series have colours of middle lightness.
"""

from __future__ import annotations

import io
import statistics
from collections.abc import Sequence
from typing import Any

INK = "#24292f"

COLOURS = ("#3f83d6", "#e0822b", "#3fa34d", "#d1495b", "#9467bd", "#a0785a", "#d678b8", "#7f8c8d", "#a8a832", "#2fb3c0")
"""The colours of series, in this order."""

POINTS = 200
"""Points of a curve; each is the mean of the values up to it."""

SIZE = (4.4, 2.7)
"""Inches of a figure that stands beside others; shown at about this size its text has nine points."""


def new_figure(xlabel: str, ylabel: str, size: tuple[float, float] = SIZE) -> tuple[Any, Any]:
    # not pyplot, which keeps its figures for the whole process: several runs may draw at once
    from cycler import cycler
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    figure = Figure(figsize=size, layout="constrained")
    axis = figure.subplots()
    axis.xaxis.set_major_formatter(EngFormatter(sep=""))  # 20k: units are many
    axis.set_prop_cycle(cycler(color=COLOURS))
    axis.set_xlabel(xlabel, fontsize=9)
    axis.set_ylabel(ylabel, fontsize=9)
    axis.tick_params(labelsize=9, colors=INK)
    axis.grid(color=INK, alpha=0.12, linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)
    return figure, axis


def svg(figure: Any) -> str:
    """Returns a figure as an SVG element with a transparent ground; its text stays text."""
    import matplotlib

    _draw_in_ink(figure)
    file = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        figure.savefig(
            file, format="svg", transparent=True, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type"))
        )
    text = file.getvalue()
    return text[text.index("<svg") :].replace(INK, "currentColor").strip()


def png(figure: Any) -> bytes:
    """Returns a figure as a PNG on white."""
    _draw_in_ink(figure)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=130)
    return file.getvalue()


def thinned(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """Returns x and y of at most about ``POINTS`` points."""
    width = max(1, len(points) // POINTS)
    parts = [points[at : at + width] for at in range(0, len(points), width)]
    return [part[-1][0] for part in parts], [statistics.fmean(y for _, y in part) for part in parts]


def _draw_in_ink(figure: Any) -> None:
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        if text.get_color() == "black":
            text.set_color(INK)
    for axis in figure.axes:
        axis.spines[:].set_edgecolor(INK)
