"""Schedules are data: for each stage the list of actions it walks, in order. Each is a generator under its picture.

Messages are not actions of their own: ``F`` takes its input from the cell before and gives its output to the next,
``B`` the other way round. ``R`` stands right before its ``B`` and only ``B`` waits for the gradient, so a stage
rebuilds while the gradient is still on its way. Which micro-batches are rebuilt is ``suite.pipeline.rebuild``'s to say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from suite.errors import SettingError
from suite.pipeline.action import Action, Kind, Schedule


def fill_drain(stages: int, micro_batches: int) -> Schedule:
    """Returns the paper's schedule (figure 2c and section 2.3), here with rebuilds, the last micro-batch not rebuilt:

        stage 0   F0 F1 F2 F3 .  .  .  .  B3 R2 B2 R1 B1 R0 B0
        stage 1   .  F0 F1 F2 F3 .  .  B3 R2 B2 R1 B1 R0 B0
        stage 2   .  .  F0 F1 F2 F3 B3 R2 B2 R1 B1 R0 B0

    All forwards, then all backwards from the last to the first: so the last one's graph is still alive.
    """
    fill = [Action("F", i) for i in range(micro_batches)]
    drain = [Action("B", i) for i in reversed(range(micro_batches))]
    return [fill + drain for _ in range(stages)]


def one_forward_one_backward(stages: int, micro_batches: int) -> Schedule:
    """Returns 1F1B (PipeDream-Flush; Narayanan et al., 2021):

        stage 0   F0 F1 F2 .  .  B0 F3 B1 F4 B2 .  B3 .  B4
        stage 1   .  F0 F1 .  B0 F2 B1 F3 B2 F4 B3 .  B4
        stage 2   .  .  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4

    As long as fill-drain, but stage k never holds more than K - k micro-batches.
    """
    forwards, backwards = ([Action(kind, i) for i in range(micro_batches)] for kind in _FB)
    return _greedy(stages, forwards, backwards, [_Room(stages - k) for k in range(stages)])


def interleaved(stages: int, micro_batches: int, turns: int) -> Schedule:
    """Returns interleaved 1F1B (Narayanan et al., 2021): a stage holds ``turns`` cells, cell v * K + k the v-th of k.

        stage 0   F0   F1   F0.1 F1.1 F2   B0.1 F3   B1.1 F2.1 B0   F3.1 B1   .    B2.1 .    B3.1 B2   B3
        stage 1   .    F0   F1   F0.1 B0.1 F1.1 B1.1 F2   B0   F3   B1   F2.1 B2.1 F3.1 B3.1 B2   B3

    Micro-batches go round in groups of K: all of a group once through the pipeline, then the same again. A turn is
    1 / ``turns`` as long, and so is the time in which the pipeline fills and drains. The last group may be smaller.
    """
    return _greedy(stages, *_in_turns(stages, micro_batches, turns), [_Room(each) for each in _ahead(stages, turns)])


def _in_turns(stages: int, micro_batches: int, turns: int) -> tuple[list[Action], list[Action]]:
    """Returns the order of forwards and that of backwards, the same on all stages."""
    rounds = [range(begin, min(begin + stages, micro_batches)) for begin in range(0, micro_batches, stages)]
    forwards = [Action("F", i, turn) for each in rounds for turn in range(turns) for i in each]
    backwards = [Action("B", i, turn) for each in rounds for turn in reversed(range(turns)) for i in each]
    return forwards, backwards


def _ahead(stages: int, turns: int) -> list[int]:
    """Returns how far each stage's forwards run ahead of its backwards."""
    return [2 * (stages - k - 1) + (turns - 1) * stages + 1 for k in range(stages)]


def zero_bubble(stages: int, micro_batches: int, turns: int = 1) -> Schedule:
    """Returns a zero-bubble schedule (Qi et al., 2023, their ZB-H1): ``B`` makes only what the stage before waits for,
    and ``W``, the gradients of the weights, fills what would be idle.

        stage 0   F0 F1 F2 .  .  B0 W0 F3 B1 W1 F4 B2 W2 B3 W3 B4 W4
        stage 1   .  F0 F1 .  B0 F2 B1 W0 F3 B2 W1 F4 B3 W2 B4 W3 W4
        stage 2   .  .  F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 F4 B4 W2 W3 W4

    Stage k runs at most K - k forwards ahead of its backwards, as 1F1B does, and no stage is more than K ahead of what
    is put off. In equal units of time a step of M >= 2K - 1 is M (F + B + W) + (K - 1) F long, which nothing that
    begins at stage 0 can go below.

    With several ``turns`` it is interleaved too, and fills a pipeline of shorter cells; no stage is further ahead of
    what is put off than stage 0 is of its backwards:

        stage 0   F0   F1   F0.1 F1.1 F2   B0.1 W0.1 B1.1 F2.1 B0   B1   W1.1 W0   B2.1 W1   B2   W2.1 W2
        stage 1   .    F0   F1   F0.1 B0.1 F1.1 B1.1 F2   B0   B1   W0.1 F2.1 B2.1 W1.1 B2   W0   W1   W2.1 W2
    """
    if turns > 1:
        ahead = _ahead(stages, turns)
        rooms = [_Room(each, ahead[0]) for each in ahead]
        return _greedy(stages, *_in_turns(stages, micro_batches, turns), rooms)
    forwards, backwards = ([Action(kind, i) for i in range(micro_batches)] for kind in _FB)
    return _greedy(stages, forwards, backwards, [_Room(stages - k, stages) for k in range(stages)])


def forward_only(stages: int, micro_batches: int, turns: int = 1) -> Schedule:
    """Returns the schedule of an evaluation: forwards alone."""
    order = fill_drain(stages, micro_batches) if turns == 1 else interleaved(stages, micro_batches, turns)
    return [[action for action in actions if action.kind == "F"] for actions in order]


_FB: tuple[Kind, Kind] = ("F", "B")


@dataclass(frozen=True)
class _Room:
    """How far a stage's forwards may run ahead: of its backwards, and of what these put off, if they put off any."""

    of_backwards: int
    of_put_off: int | None = None


def _greedy(
    stages: int, forwards: Sequence[Action], backwards: Sequence[Action], rooms: Sequence[_Room]
) -> Schedule:  # fmt: skip
    """Plays all stages in equal units of time: one that is free takes its next forward if there is room and its input
    is there, else its next backward if its gradient is there, else what was put off.

    Raises SettingError when no stage has any of these: they would wait for each other for ever.
    """
    schedule: Schedule = [[] for _ in range(stages)]
    ended: dict[tuple[Kind, int, int], int] = {}  # by kind, cell and micro-batch
    counts = [{"F": 0, "B": 0, "W": 0} for _ in range(stages)]
    last = max((action.turn for action in forwards), default=0) * stages + stages - 1

    def there(action: Action, k: int, unit: int) -> bool:
        cell, i = action.turn * stages + k, action.micro_batch
        if action.kind == "F":
            return cell == 0 or ended.get(("F", cell - 1, i), unit + 1) <= unit
        return ended.get(("F", cell, i) if cell == last else ("B", cell + 1, i), unit + 1) <= unit

    def choice(k: int, unit: int) -> Action | None:
        count, room = counts[k], rooms[k]
        free = count["F"] - count["B"] < room.of_backwards
        if room.of_put_off is not None:
            free = free and count["F"] - count["W"] < room.of_put_off
        if count["F"] < len(forwards) and free and there(forwards[count["F"]], k, unit):
            return forwards[count["F"]]
        if count["B"] < count["F"] and there(backwards[count["B"]], k, unit):
            return backwards[count["B"]]
        if room.of_put_off is not None and count["W"] < count["B"]:
            done = backwards[count["W"]]
            return Action("W", done.micro_batch, done.turn)
        return None

    unit, whole = 0, len(forwards) * (2 if rooms[0].of_put_off is None else 3)
    while any(len(actions) < whole for actions in schedule):
        idle = True
        for k, actions in enumerate(schedule):
            action = choice(k, unit)
            if action is not None:
                idle = False
                actions.append(action)
                counts[k][action.kind] += 1
                ended[action.kind, action.turn * stages + k, action.micro_batch] = unit + 1
        if idle:
            made = ", ".join(f"{len(actions)} of stage {k}" for k, actions in enumerate(schedule))
            raise SettingError(f"no stage can go on after {made}, of {whole} actions each; give stages more room")
        unit += 1
    return schedule
