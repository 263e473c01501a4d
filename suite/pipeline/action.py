"""The words of a schedule: what a stage does with one micro-batch in one of its cells.

F3     forward of micro-batch 3            B3     backward; only of the inputs where a W3 follows
R3     rebuild of its activations          W3     gradients of the weights, put off by B3
F3.1   the same in the second cell of a stage that holds several
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from suite.errors import SettingError

Kind = Literal["F", "R", "B", "W"]

KINDS = "FRBW"


@dataclass(frozen=True, slots=True)
class Action:
    """One thing a stage does with one micro-batch; prints as ``F3`` and parses back."""

    kind: Kind
    micro_batch: int
    turn: int = 0
    """Which of the stage's cells: a micro-batch passes all stages once a turn."""

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch}" + (f".{self.turn}" if self.turn else "")

    @staticmethod
    def parse(text: str) -> Action:
        """Returns the action that ``text`` prints. Raises SettingError for anything else."""
        match = re.fullmatch(r"([FRBW])(\d+)(?:\.([1-9]\d*))?", text)
        if match is None:
            raise SettingError(f"{text!r} is no action; actions look like F3, R3, B3, W3, or F3.1 in a second cell")
        return Action(match[1], int(match[2]), int(match[3] or 0))  # type: ignore[arg-type]


Schedule = list[list[Action]]
"""The actions of each stage, in order."""


def turns_of(schedule: Sequence[Sequence[Action]]) -> int:
    """Returns how many cells a stage holds."""
    return 1 + max((action.turn for actions in schedule for action in actions), default=0)


def rebuilt_in(actions: Sequence[Action]) -> set[tuple[int, int]]:
    """Returns (turn, micro-batch) of all that a stage rebuilds."""
    return {(action.turn, action.micro_batch) for action in actions if action.kind == "R"}


def put_off_in(actions: Sequence[Action]) -> set[tuple[int, int]]:
    """Returns (turn, micro-batch) of all whose weights' gradients a stage puts off."""
    return {(action.turn, action.micro_batch) for action in actions if action.kind == "W"}


def closing_in(actions: Sequence[Action]) -> set[Action]:
    """Returns the last action of each of a stage's cells that adds to gradients."""
    return set({action.turn: action for action in actions if action.kind in "BW"}.values())
