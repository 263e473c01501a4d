"""The figures of a step in one line: in a terminal's bar, in the log of a job, and wherever else a step is shown.

step 300/1000  loss 4.213  grad 0.87  lr 4.2e-04  1,234 tokens/s (617 each)  21.3 GFLOP/s  MFU 29.1%  0:12 left
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from experiments.base.figures import in_figures
from suite.training import metrics

Values = Mapping[str, float | None]
"""A line of ``metrics.jsonl``, where null is a number that is not finite."""

Figure = tuple[int, str]
"""Its rank and its text; where there is little room, figures of higher ranks are left out first."""

WIDTH = 100
"""Columns of a line that does not go to a terminal."""

_GAP = "  "


def validation_line(values: Values) -> str:
    """Returns a validation's line, without the figures of single languages; empty for any other line of metrics."""
    figures = {name.removeprefix("valid/"): value for name, value in values.items() if name.startswith("valid/")}
    seconds = figures.pop("seconds", None)
    shown = [f"{name} {_number(value, '.4f')}" for name, value in figures.items() if "/" not in name]
    if not shown:
        return ""
    duration = "" if seconds is None else f" ({seconds:.0f} s)" if seconds >= 10 else f" ({seconds:.2g} s)"
    return f"step {int(values[metrics.STEP] or 0)}: validation {', '.join(shown)}{duration}"


def headed(step: int, steps: int, ranked: Sequence[Figure], width: int = WIDTH) -> str:
    """Returns the line of a step with these figures."""
    head = f"step {step}/{steps}{_GAP}"
    return head + fitted(ranked, width - len(head))


def figures(
    values: Values, steps: int, unit: str, step_s: float | None = None, validations_s: float = 0.0
) -> list[Figure]:
    """Returns the figures of a step of a run with ``steps`` steps, in the order of the line.

    The time left is computed from ``step_s``, the time per step (None: that of this step), and ``validations_s``, the
    time of all validations to come.
    """
    get = values.get
    left_s = (steps - int(get(metrics.STEP) or 0)) * (step_s or get(metrics.STEP_S) or 0.0) + validations_s
    rate, each = get(metrics.units_per_s(unit)), get(metrics.units_per_s_per_device(unit))
    found: list[Figure] = [(0, f"loss {_number(get(metrics.LOSS), '.3f')}")]
    if metrics.GRAD_NORM in values:
        found.append((4, f"grad {_number(get(metrics.GRAD_NORM), '.3g')}"))
    if metrics.LR in values:
        found.append((6, f"lr {_number(get(metrics.LR), '.2g')}"))
    if rate is not None:
        found.append((2, f"{in_figures(rate)} {unit}/s"))
    if rate is not None and each is not None and each < rate:
        found.append((8, f"{in_figures(each)}/device"))
    if (tflops := get(metrics.TFLOPS_PER_DEVICE)) is not None:
        found.append((7, f"{tflops:.3g} TFLOP/s" if tflops >= 1 else f"{1e3 * tflops:.3g} GFLOP/s"))
    mfu, hfu = get(metrics.MFU), get(metrics.HFU)
    if mfu is not None:
        found.append((3, f"MFU {mfu:.1%}"))
    if mfu is not None and hfu is not None and hfu > mfu:
        found.append((9, f"HFU {hfu:.1%}"))
    if (peak := get(metrics.PEAK_GIB)) is not None:
        found.append((5, f"{peak:.3g} GiB"))
    found.append((1, f"{_duration(left_s)} left"))
    return found


def fitted(ranked: Sequence[Figure], width: int) -> str:
    """Returns as many figures as ``width`` columns hold, at least the first."""
    chosen = list(ranked)
    while len(line := _GAP.join(text for _, text in chosen)) > width and len(chosen) > 1:
        chosen.remove(max(chosen))
    return line


def _number(value: float | None, form: str) -> str:
    return "not finite" if value is None or not math.isfinite(value) else format(value, form)


def _duration(seconds: float) -> str:
    """Returns 0:07, 12:34 or 5:06:07."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
