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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from suite.errors import SettingError
from suite.settings import Remat

Kind = Literal["F", "R", "B"]

DRAWN_STAGES, DRAWN_UNITS = 16, 40
"""What the picture in an error message shows at most: stages, and units of time before the deadlock."""


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

    Raises SettingError with the faulty stage and action, or with the timeline up to the deadlock, cut
    to at most DRAWN_STAGES by DRAWN_UNITS cells around it.
    """
    _check_each_stage(schedule, micro_batches, train)
    _check_message_order(schedule)
    units = _play(schedule)
    timeline = _timeline(schedule, units)
    stuck = {
        k: actions[len(played)]
        for k, (actions, played) in enumerate(zip(schedule, units, strict=True))
        if len(played) < len(actions)
    }
    if stuck:
        raise SettingError(_deadlock(stuck, timeline))
    return timeline


def draw(timeline: Sequence[Sequence[str]], first_stage: int = 0) -> str:
    """Returns the timeline as text, a row a stage, the first of them being ``first_stage``."""
    width = max((len(cell) for row in timeline for cell in row), default=1)
    return "\n".join(
        f"stage {k:<3} " + " ".join(cell.ljust(width) for cell in row) for k, row in enumerate(timeline, first_stage)
    )


def _play(schedule: Sequence[Sequence[Action]]) -> list[list[int]]:
    """Returns the unit of time of each stage's actions, as early as can be, up to the one it waits at for ever.

    Neighbours agree on the order of their messages, so the n-th forward of a stage takes what the n-th forward of the
    stage before sent, and what has arrived is known by counting.
    """
    units: list[list[int]] = [[] for _ in schedule]
    ran: list[dict[Kind, list[int]]] = [{"F": [], "R": [], "B": []} for _ in schedule]
    last = len(schedule) - 1
    awake = list(range(len(schedule)))
    while awake:
        k = awake.pop()
        sources = {"F": ran[k - 1]["F"] if k else None, "R": None, "B": ran[k + 1]["B"] if k < last else None}
        actions, played = schedule[k], units[k]
        begun = len(played)
        while len(played) < len(actions):
            kind = actions[len(played)].kind
            unit = played[-1] + 1 if played else 0
            taken, sent = ran[k][kind], sources[kind]
            if sent is not None:
                if len(taken) == len(sent):
                    break
                unit = max(unit, sent[len(taken)] + 1)
            played.append(unit)
            taken.append(unit)
        if len(played) > begun:  # what it sent may be what a neighbour waits for
            awake += [n for n in (k - 1, k + 1) if 0 <= n <= last]
    return units


def _timeline(schedule: Sequence[Sequence[Action]], units: Sequence[Sequence[int]]) -> list[list[str]]:
    """Returns the text cells of what was played; where a stage waits stands a dot."""
    length = max((played[-1] + 1 for played in units if played), default=0)
    timeline = [["."] * length for _ in schedule]
    for row, actions, played in zip(timeline, schedule, units, strict=True):
        for action, unit in zip(actions, played, strict=False):  # a stuck stage played fewer than it has
            row[unit] = str(action)
    return timeline


def _deadlock(stuck: Mapping[int, Action], timeline: Sequence[Sequence[str]]) -> str:
    """Returns the message of a deadlock: who waits at which action, and the picture, cut to where it happens."""
    # A stage at F waits for the stage before, one at B for the next, and whoever has ended has sent everything: so two
    # neighbours wait for each other, and all others for them.
    heart = next(k for k, action in stuck.items() if action.kind == "B" and stuck[k + 1].kind == "F")
    stages = len(timeline)
    first = max(0, min(heart + 1 - DRAWN_STAGES // 2, stages - DRAWN_STAGES))
    drawn = range(first, min(stages, first + DRAWN_STAGES))
    text = ", ".join(f"stage {k} at {stuck[k]}" for k in drawn if k in stuck)
    others = len(stuck) - sum(k in stuck for k in drawn)
    text = f"the schedule deadlocks: {text}{f' and {others} other stages' if others else ''} wait for each other"
    end = max((unit + 1 for k in drawn for unit, cell in enumerate(timeline[k]) if cell != "."), default=0)
    start = max(0, end - DRAWN_UNITS)
    if len(drawn) < stages or start:
        text += f"; drawn are stages {drawn[0]} to {drawn[-1]} of {stages} and their last {end - start} units of time"
    return f"{text}\n{draw([timeline[k][start:end] for k in drawn], first)}"


def _check_each_stage(schedule: Sequence[Sequence[Action]], micro_batches: int, train: bool) -> None:
    for k, actions in enumerate(schedule):
        unknown = [a for a in actions if a.kind not in ("F", "R", "B")]
        if unknown:
            raise SettingError(f"stage {k} runs {unknown[0]}, which is no action; actions look like F3, R3, B3")
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
