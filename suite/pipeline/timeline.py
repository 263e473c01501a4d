"""A step as it was played or measured: for each stage, when it did what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["F", "R", "B", "W", "U"]
"""Forward, rebuild, backward, gradients of weights; ``U`` is the update at the end of the mini-batch: reductions and
the optimizer."""


@dataclass(frozen=True, slots=True)
class Span:
    """One thing a stage did without a break, in seconds since the step began. Waiting is what lies between spans."""

    kind: Kind
    micro_batch: int
    """-1 for an update, which belongs to all of them."""
    start: float
    end: float
    turn: int = 0
    """In which of the stage's cells."""

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.start

    def __str__(self) -> str:
        if self.micro_batch < 0:
            return self.kind
        return f"{self.kind}{self.micro_batch}" + (f".{self.turn}" if self.turn else "")


@dataclass(frozen=True)
class Timeline:
    """One row of spans a stage, each in the order of time."""

    rows: tuple[tuple[Span, ...], ...]

    @property
    def seconds(self) -> float:
        """When the last stage was done."""
        return max((row[-1].end for row in self.rows if row), default=0.0)

    def busy(self, stage: int, kinds: str = "FRBWU") -> float:
        """Returns the seconds a stage spent on actions of these kinds."""
        return sum(span.seconds for span in self.rows[stage] if span.kind in kinds)

    def idle(self, stage: int) -> float:
        """Returns the share of the step, 0 to 1, in which a stage did nothing."""
        return 1 - self.busy(stage) / self.seconds if self.seconds else 0.0

    @property
    def bubble(self) -> float:
        """The idle share of all stages together."""
        return sum(self.idle(stage) for stage in range(len(self.rows))) / len(self.rows)


def text(timeline: Timeline, width: int = 100) -> str:
    """Returns the timeline as text, a row a stage, ``width`` characters for the whole step.

    A character is the kind that fills most of its time, a dot where that is waiting.
    """
    return "\n".join(f"stage {k:<3} {_row(row, timeline.seconds, width)}" for k, row in enumerate(timeline.rows))


def _row(row: Sequence[Span], seconds: float, width: int) -> str:
    slot = seconds / width if seconds else 1.0
    shares: list[dict[str, float]] = [{} for _ in range(width)]
    for span in row:
        for at in range(int(span.start / slot), min(width, int(span.end / slot) + 1)):
            share = min(span.end, (at + 1) * slot) - max(span.start, at * slot)
            shares[at][span.kind] = shares[at].get(span.kind, 0.0) + max(0.0, share)
    return "".join(_most(filled, slot) for filled in shares)


def _most(filled: dict[str, float], slot: float) -> str:
    waiting = slot - sum(filled.values())
    kind = max(filled, key=filled.__getitem__, default=".")
    return kind if filled.get(kind, 0.0) > waiting else "."
