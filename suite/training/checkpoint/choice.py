"""Which checkpoint a command uses: ``best``, ``latest``, a step, or by default the best where there is one.

best      the newest one with a mark: no validation before it was better
latest    the newest one
<step>    that one

The default and ``latest`` fall back to another checkpoint when a file is damaged. An abandoned checkpoint is used by
its step alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, cast, get_args

from suite.errors import CheckpointError, SettingError
from suite.training.checkpoint.reading import Checkpoint, current

Named = Literal["best", "latest"]
Choice = Named | int | None
"""None: the best where there is one, otherwise the latest."""


def parse_choice(text: str) -> Choice:
    """Returns the choice that a user typed; None for nothing. Raises SettingError for anything else."""
    if text in get_args(Named):
        return cast(Named, text)
    if text.isdecimal():
        return int(text)
    if text:
        raise SettingError(f"unknown checkpoint {text[:100]!r}; choose best, latest or the number of a step")
    return None


def in_order(checkpoints: Sequence[Checkpoint], choice: Choice, place: str) -> list[Checkpoint]:
    """Returns the checkpoints to try, in order, of those of a run, newest first; none if there are none at all.

    Raises CheckpointError when the chosen one is not there, with those that are.
    """
    best, usable = best_of(checkpoints), current(checkpoints)
    if choice is None:
        return [*([best] if best else []), *(other for other in usable if other is not best)]
    if choice == "latest" or not checkpoints:
        return usable
    chosen = best if choice == "best" else next((each for each in checkpoints if each.step == choice), None)
    if chosen is None:
        steps = ", ".join(f"{each.step} (the best)" if each is best else str(each.step) for each in checkpoints)
        missing = (
            "has no best checkpoint, because no validation has chosen one (train.validate_every)"
            if choice == "best"
            else f"has no checkpoint of step {choice}"
        )
        raise CheckpointError(f"{place} {missing}; it has those of steps {steps}; choose one of them, or latest")
    return [chosen]


def best_of(checkpoints: Sequence[Checkpoint]) -> Checkpoint | None:
    """Returns the best of a run's checkpoints, newest first; None if none is marked."""
    return next((each for each in current(checkpoints) if each.best), None)
