"""The actions of a schedule: what a stage does with one micro-batch in one of its cells.

F3     forward of micro-batch 3                B3     backward
R3     recompute of its activations            I3     backward that defers the weight gradients of linear layers
F3.1   forward in the stage's second cell      W3     adds the deferred weight gradients

All other layers compute their weight gradients in ``I`` (``suite.pipeline.runtime.weight_grad``).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from suite.errors import SettingError
from suite.pipeline.model.cells import CellPlacement

ActionKind = Literal["F", "R", "I", "B", "W"]

KINDS = "FRIBW"


@dataclass(frozen=True, slots=True)
class Effect:
    """What an action of some kind does in its cell, as changes of what the cell holds of the action's micro-batch."""

    direction: int = 0
    """Where its messages go: 1 activations to the next cell, -1 gradients to the previous one, 0 it sends none."""
    inputs: int = 0
    """1: it saves the inputs; -1: it frees them, because all weight gradients of the micro-batch are added."""
    graphs: int = 0
    """1: it makes an autograd graph (a forward does so only where no recompute follows); -1: it frees it."""
    deferred: int = 0
    """1: it defers weight gradients; -1: it adds the deferred ones."""


EFFECTS: dict[str, Effect] = {
    "F": Effect(direction=1, inputs=1, graphs=1),
    "R": Effect(graphs=1),
    "I": Effect(direction=-1, graphs=-1, deferred=1),
    "B": Effect(direction=-1, inputs=-1, graphs=-1),
    "W": Effect(inputs=-1, deferred=-1),
}

_DIRECTIONS = {kind: effect.direction for kind, effect in EFFECTS.items()}


@dataclass(frozen=True, slots=True)
class Action:
    """One thing a stage does with one micro-batch; prints as ``F3`` and parses back."""

    kind: ActionKind
    micro_batch: int
    virtual_stage: int = 0
    """Which of the stage's cells."""

    @property
    def direction(self) -> int:
        """The direction of its messages (``Effect``); 0 also for an unknown kind."""
        return _DIRECTIONS.get(self.kind, 0)

    def cell(self, stage: int, placement: CellPlacement) -> int:
        """Returns the index of its cell."""
        return placement.cell_of(self.virtual_stage, stage)

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch}" + (f".{self.virtual_stage}" if self.virtual_stage else "")

    @staticmethod
    def parse(text: str) -> Action:
        """Returns the action that ``text`` prints. Raises SettingError for anything else."""
        match = re.fullmatch(r"([FRIBW])(\d+)(?:\.([1-9]\d*))?", text)
        if match is None:
            raise SettingError(f"{text!r} is no action; actions look like F3, R3, I3, B3, W3, or F3.1 in a second cell")
        return Action(match[1], int(match[2]), int(match[3] or 0))  # type: ignore[arg-type]


Schedule = list[list[Action]]
"""The actions of each stage, in order."""


def virtual_stages_of(schedule: Sequence[Sequence[Action]]) -> int:
    """Returns how many cells a stage holds."""
    return 1 + max((action.virtual_stage for actions in schedule for action in actions), default=0)


def of_kind(actions: Sequence[Action], kind: ActionKind) -> set[tuple[int, int]]:
    """Returns (virtual stage, micro-batch) of a stage's actions of one kind."""
    return {(action.virtual_stage, action.micro_batch) for action in actions if action.kind == kind}


def last_grad_actions(actions: Sequence[Action]) -> set[Action]:
    """Returns for each cell of a stage the last action that adds to weight gradients."""
    return set({action.virtual_stage: action for action in actions if EFFECTS[action.kind].inputs < 0}.values())
