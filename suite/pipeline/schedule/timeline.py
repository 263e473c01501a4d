"""A simulated or measured step: what each stage did when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

SpanKind = Literal["F", "R", "I", "B", "W", "U"]
"""Kinds of actions (``suite.pipeline.schedule.action``), and ``U``: the end of the mini-batch. Simulated, it
is reductions and the optimizer; measured, it begins after the reductions."""


@dataclass(frozen=True, slots=True)
class Span:
    """One action of a stage, in seconds since the step began. A stage waits between its spans."""

    kind: SpanKind
    micro_batch: int
    """-1 for an update, which belongs to the whole mini-batch."""
    start: float
    end: float
    virtual_stage: int = 0
    """Which of the stage's cells."""

    @property
    def seconds(self) -> float:
        return self.end - self.start

    def as_list(self) -> list[Any]:
        """Returns it for JSON: kind, micro-batch, start, end and virtual stage."""
        return [self.kind, self.micro_batch, round(self.start, 6), round(self.end, 6), self.virtual_stage]

    def __str__(self) -> str:
        if self.micro_batch < 0:
            return self.kind
        return f"{self.kind}{self.micro_batch}" + (f".{self.virtual_stage}" if self.virtual_stage else "")


@dataclass(frozen=True)
class Timeline:
    """One row of spans a stage, each in order of time."""

    rows: tuple[tuple[Span, ...], ...]

    def as_lists(self) -> list[list[list[Any]]]:
        """Returns it for JSON."""
        return [[span.as_list() for span in row] for row in self.rows]

    @classmethod
    def from_lists(cls, rows: Sequence[Sequence[Sequence[Any]]]) -> Timeline:
        """Returns the timeline that ``as_lists`` wrote."""
        return cls(tuple(tuple(Span(*span) for span in row) for row in rows))

    @property
    def seconds(self) -> float:
        """When the last stage ends."""
        return max((row[-1].end for row in self.rows if row), default=0.0)

    def busy(self, stage: int, kinds: str = "FRIBWU") -> float:
        """Returns the seconds a stage spent on actions of these kinds."""
        return sum(span.seconds for span in self.rows[stage] if span.kind in kinds)

    def idle(self, stage: int) -> float:
        """Returns the share of the step, 0 to 1, in which a stage is idle."""
        return 1 - self.busy(stage) / self.seconds if self.seconds else 0.0

    @property
    def bubble(self) -> float:
        """The idle share of all stages together."""
        return sum(self.idle(stage) for stage in range(len(self.rows))) / len(self.rows)
