"""A schedule is data: for each stage the list of actions it walks, in order.

Fill-drain with early rebuild, K = 3 stages, M = 4 micro-batches, the last one not rebuilt (paper, figure 2c and 2.3):

    time ->
    stage 0   F0 F1 F2 F3 .  .  .  .  .  .  .  B3 R2 B2 R1 B1 R0 B0
    stage 1   .  F0 F1 F2 F3 .  .  .  .  B3 R2 B2 R1 B1 R0 B0
    stage 2   .  .  F0 F1 F2 F3 B3 R2 B2 R1 B1 R0 B0

``F`` forward, ``R`` rebuild of the activations that a forward threw away, ``B`` backward. ``R`` stands before ``B`` and
only ``B`` waits for the gradient from the next stage, so a stage rebuilds while the gradient is still on its way.
Messages are not actions of their own: ``F`` takes its input from the stage before and gives its output to the next,
``B`` the other way round.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from suite.errors import SettingError
from suite.settings import Remat

Kind = Literal["F", "R", "B"]


@dataclass(frozen=True, slots=True)
class Action:
    """One thing a stage does with one micro-batch; prints as ``F3`` and parses back."""

    kind: Kind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch}"

    @staticmethod
    def parse(text: str) -> Action:
        """Returns the action that ``text`` prints. Raises SettingError for anything else."""
        match = re.fullmatch(r"([FRB])(\d+)", text)
        if match is None:
            raise SettingError(f"{text!r} is no action; actions look like F3, R3, B3")
        return Action(match[1], int(match[2]))  # type: ignore[arg-type]


Schedule = list[list[Action]]


def rebuilt(micro_batches: int, remat: Remat) -> set[int]:
    """Returns the micro-batches whose activations are thrown away in the forward and made again for the backward."""
    if remat == "never":
        return set()
    return set(range(micro_batches if remat == "always" else micro_batches - 1))


def fill_drain(stages: int, micro_batches: int, remat: Remat) -> Schedule:
    """Returns the paper's schedule, one list of actions a stage; see the picture above."""
    again = rebuilt(micro_batches, remat)
    fill = [Action("F", i) for i in range(micro_batches)]
    drain: list[Action] = []
    for i in reversed(range(micro_batches)):
        if i in again:
            drain.append(Action("R", i))
        drain.append(Action("B", i))
    return [fill + drain for _ in range(stages)]


def forward_only(stages: int, micro_batches: int) -> Schedule:
    """Returns the schedule of an evaluation: the fill without the drain."""
    return [[Action("F", i) for i in range(micro_batches)] for _ in range(stages)]


def validate(schedule: Sequence[Sequence[Action]], micro_batches: int, train: bool = True) -> list[list[str]]:
    """Plays a schedule as fast as its messages allow and returns its timeline, a text cell a stage and unit of time.

    Every stage must run each micro-batch's ``F`` once and, to train, its ``B`` once after it with at most one ``R``
    between; and no stage may wait for ever. Messages between two stages arrive in the order they were sent.

    Raises SettingError with the faulty stage and action, or with the timeline up to the deadlock.
    """
    _check_each_stage(schedule, micro_batches, train)
    _check_message_order(schedule)
    done: list[set[Action]] = [set() for _ in schedule]
    position = [0] * len(schedule)
    timeline: list[list[str]] = [[] for _ in schedule]
    while any(at < len(actions) for at, actions in zip(position, schedule, strict=True)):
        ready = [
            at < len(actions) and _arrived(actions[at], k, len(schedule), done)
            for k, (at, actions) in enumerate(zip(position, schedule, strict=True))
        ]
        if not any(ready):
            stuck = ", ".join(
                f"stage {k} at {a[at]}" for k, (at, a) in enumerate(zip(position, schedule, strict=True)) if at < len(a)
            )
            raise SettingError(f"the schedule deadlocks: {stuck} wait for each other\n{draw(timeline)}")
        for k, go in enumerate(ready):
            timeline[k].append(str(schedule[k][position[k]]) if go else ".")
        for k, go in enumerate(ready):
            if go:
                done[k].add(schedule[k][position[k]])
                position[k] += 1
    return timeline


def draw(timeline: Sequence[Sequence[str]]) -> str:
    """Returns the timeline as text, a row a stage."""
    width = max((len(cell) for row in timeline for cell in row), default=1)
    return "\n".join(f"stage {k:<3} " + " ".join(cell.ljust(width) for cell in row) for k, row in enumerate(timeline))


def _arrived(action: Action, stage: int, stages: int, done: Sequence[set[Action]]) -> bool:
    """Whether what ``action`` takes from its neighbour was sent in an earlier unit of time."""
    if action.kind == "F":
        return stage == 0 or action in done[stage - 1]
    if action.kind == "B":
        return stage == stages - 1 or action in done[stage + 1]
    return True


def _check_each_stage(schedule: Sequence[Sequence[Action]], micro_batches: int, train: bool) -> None:
    for k, actions in enumerate(schedule):
        place = {action: at for at, action in enumerate(actions)}
        if len(place) != len(actions):
            twice = next(a for a in actions if list(actions).count(a) > 1)
            raise SettingError(f"stage {k} runs {twice} more than once")
        foreign = [a for a in actions if not 0 <= a.micro_batch < micro_batches]
        if foreign:
            raise SettingError(f"stage {k} runs {foreign[0]}, but there are {micro_batches} micro-batches")
        for i in range(micro_batches):
            forward, again, backward = (place.get(Action(kind, i)) for kind in ("F", "R", "B"))
            if forward is None or (train and backward is None):
                raise SettingError(f"stage {k} never runs {'F' if forward is None else 'B'}{i}")
            if not train and (again is not None or backward is not None):
                raise SettingError(f"stage {k} runs a rebuild or backward of micro-batch {i} in an evaluation")
            if backward is not None and not forward < (forward + 0.5 if again is None else again) < backward:
                raise SettingError(
                    f"stage {k} runs micro-batch {i} out of order: it must be F{i}, then R{i} if any, then B{i}"
                )


def _check_message_order(schedule: Sequence[Sequence[Action]]) -> None:
    """Two stages must agree on the order of the messages between them: a link delivers in the order of sending."""
    for k in range(len(schedule) - 1):
        for kind, what in (("F", "activations"), ("B", "gradients")):
            here, there = ([a.micro_batch for a in schedule[s] if a.kind == kind] for s in (k, k + 1))
            if here != there:
                raise SettingError(f"stages {k} and {k + 1} disagree on the order of {what}: {here} against {there}")
