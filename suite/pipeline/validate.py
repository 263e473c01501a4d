"""Checks a schedule before anything runs: each stage's order, that of messages, and that nobody waits for ever.

Cell v * K + k is the v-th of stage k. Activations go from each cell to the next, gradients back; the last cell's are on
stage K - 1, and behind a turn's last stage comes the first stage's next cell.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from suite.errors import SettingError
from suite.pipeline.action import KINDS, Action, Kind, turns_of
from suite.pipeline.transport import WINDOW, outstanding

DRAWN_STAGES, DRAWN_UNITS = 16, 40
"""What the picture in an error message shows at most: stages, and units of time before the deadlock."""


def validate(schedule: Sequence[Sequence[Action]], micro_batches: int, train: bool = True) -> list[list[str]]:
    """As ``check``, but returns the picture's cells: a text for each stage and unit of time."""
    return _timeline(schedule, check(schedule, micro_batches, train))


def check(schedule: Sequence[Sequence[Action]], micro_batches: int, train: bool = True) -> list[list[int]]:
    """Plays a schedule as fast as its messages allow; returns the unit of time in which each action plays, a list a
    stage.

    In each of its cells every stage must run each micro-batch's ``F`` once and, to train, its ``B`` once after it with
    at most one ``R`` between and at most one ``W`` after; and no stage may wait for ever, also not for room where no
    more messages may be under way (``suite.pipeline.transport``). Messages between two cells arrive in the order in
    which they were sent.

    Raises SettingError with the faulty stage and action, or with the timeline up to the deadlock, cut
    to at most DRAWN_STAGES by DRAWN_UNITS cells around it.
    """
    turns = turns_of(schedule)
    _check_each_stage(schedule, turns, micro_batches, train)
    _check_message_order(schedule, turns)
    game = _Game(schedule, turns)
    game.play()
    stuck = {
        k: actions[len(played)]
        for k, (actions, played) in enumerate(zip(schedule, game.units, strict=True))
        if len(played) < len(actions)
    }
    if stuck:
        raise SettingError(_deadlock(stuck, game, _timeline(schedule, game.units)))
    return game.units


def draw(timeline: Sequence[Sequence[str]], first_stage: int = 0) -> str:
    """Returns the timeline as text, a row a stage, the first of them being ``first_stage``."""
    width = max((len(cell) for row in timeline for cell in row), default=1)
    return "\n".join(
        f"stage {k:<3} " + " ".join(cell.ljust(width) for cell in row) for k, row in enumerate(timeline, first_stage)
    )


@dataclass
class _Cell:
    """What has been played of one cell."""

    ran: dict[Kind, list[int]] = field(default_factory=lambda: {kind: [] for kind in KINDS})  # type: ignore[misc]
    sent: list[tuple[int, Kind | None, int]] = field(default_factory=list)
    """Its messages: to which cell, of which kind, the how manieth of these. None is what is announced first of all."""


class _Game:
    """Plays all stages, each action as early as can be, up to the one that a stage waits at for ever.

    Cells agree on the order of their messages, so the n-th forward of a cell takes what the n-th of the cell before
    sent, and what has arrived is known by counting.
    """

    def __init__(self, schedule: Sequence[Sequence[Action]], turns: int) -> None:
        self._schedule, self._stages = schedule, len(schedule)
        self.unsent = outstanding(self._stages, turns)
        count = self._stages * turns
        self._cells = [_Cell(sent=[(at + 1, None, 0)] if at < count - 1 else []) for at in range(count)]
        self.units: list[list[int]] = [[] for _ in schedule]
        """When each action played, a list a stage."""
        self.full: set[int] = set()
        """Stages that wait for room: too many of their messages are under way."""

    def play(self) -> None:
        awake = list(range(self._stages))
        while awake:
            k = awake.pop()
            begun = len(self.units[k])
            while len(self.units[k]) < len(self._schedule[k]) and self._act(k):
                pass
            if len(self.units[k]) > begun:  # what it sent or took may be what a neighbour waits for
                awake += {(k - 1) % self._stages, (k + 1) % self._stages} - {k}

    def _act(self, k: int) -> bool:
        """Plays the next action of a stage; returns whether it could."""
        action, played = self._schedule[k][len(self.units[k])], self.units[k]
        at = action.turn * self._stages + k
        cell, source = self._cells[at], self._neighbour(at, action.kind, back=True)
        self.full.discard(k)
        if played and not self._room(k):
            self.full.add(k)
            return False
        unit = played[-1] + 1 if played else 0
        taken = cell.ran[action.kind]
        if source is not None:
            arrived = self._cells[source].ran[action.kind]
            if len(taken) == len(arrived):
                return False
            unit = max(unit, arrived[len(taken)] + 1)
        target = self._neighbour(at, action.kind)
        if target is not None:
            cell.sent.append((target, action.kind, len(taken)))
        played.append(unit)
        taken.append(unit)
        return True

    def _neighbour(self, at: int, kind: Kind, back: bool = False) -> int | None:
        """Returns the cell that a cell's actions send to, or with ``back`` wait for."""
        way = {"F": 1, "B": -1}.get(kind, 0) * (-1 if back else 1)
        return at + way if way and 0 <= at + way < len(self._cells) else None

    def _room(self, k: int) -> bool:
        """Returns whether a stage's last message has let it go on: the oldest of those under way must find a receive.

        Receives of a cell are posted when its stage comes to its first action, and then ``WINDOW`` ahead.
        """
        last = self._schedule[k][len(self.units[k]) - 1]
        sent = self._cells[last.turn * self._stages + k].sent
        if last.kind not in "FB" or len(sent) <= self.unsent:
            return True
        target, kind, number = sent[-1 - self.unsent]
        return self._opened(target) and (kind is None or len(self._cells[target].ran[kind]) > number - WINDOW)

    def _opened(self, at: int) -> bool:
        k, turn = at % self._stages, at // self._stages
        if turn == 0 or self._cells[at].ran["F"]:
            return True
        reached = len(self.units[k])
        return reached < len(self._schedule[k]) and self._schedule[k][reached].turn == turn


def _timeline(schedule: Sequence[Sequence[Action]], units: Sequence[Sequence[int]]) -> list[list[str]]:
    """Returns the text cells of what was played; where a stage waits stands a dot."""
    length = max((played[-1] + 1 for played in units if played), default=0)
    timeline = [["."] * length for _ in schedule]
    for row, actions, played in zip(timeline, schedule, units, strict=True):
        for action, unit in zip(actions, played, strict=False):  # a stuck stage played fewer than it has
            row[unit] = str(action)
    return timeline


def _deadlock(stuck: Mapping[int, Action], game: _Game, timeline: Sequence[Sequence[str]]) -> str:
    """Returns the message of a deadlock: who waits at which action, and the picture, cut to where it happens."""
    heart = _heart(stuck)
    stages = len(timeline)
    first = max(0, min(heart + 1 - DRAWN_STAGES // 2, stages - DRAWN_STAGES))
    drawn = range(first, min(stages, first + DRAWN_STAGES))
    text = ", ".join(f"stage {k} at {stuck[k]}" for k in drawn if k in stuck)
    others = len(stuck) - sum(k in stuck for k in drawn)
    text = f"the schedule deadlocks: {text}{f' and {others} other stages' if others else ''} wait for each other"
    if game.full:
        named = ", ".join(map(str, sorted(game.full)[:DRAWN_STAGES]))
        text += f"; at stage {named} more than {game.unsent} messages would be under way"
    end = max((unit + 1 for k in drawn for unit, cell in enumerate(timeline[k]) if cell != "."), default=0)
    start = max(0, end - DRAWN_UNITS)
    if len(drawn) < stages or start:
        text += f"; drawn are stages {drawn[0]} to {drawn[-1]} of {stages} and their last {end - start} units of time"
    return f"{text}\n{draw([timeline[k][start:end] for k in drawn], first)}"


def _heart(stuck: Mapping[int, Action]) -> int:
    """Returns a stage that waits for a gradient while the next one waits for an activation, or else any stuck stage."""
    for k, action in stuck.items():
        if action.kind == "B" and k + 1 in stuck and stuck[k + 1].kind == "F":
            return k
    return next(iter(stuck))


def _check_each_stage(
    schedule: Sequence[Sequence[Action]], turns: int, micro_batches: int, train: bool
) -> None:  # fmt: skip
    for k, actions in enumerate(schedule):
        if _whole(actions, turns, micro_batches, train):
            continue
        unknown = [a for a in actions if a.kind not in KINDS or a.turn < 0]
        if unknown:
            raise SettingError(f"stage {k} runs {unknown[0]}, which is no action; actions look like F3, R3, B3, W3")
        place = {action: at for at, action in enumerate(actions)}
        if len(place) != len(actions):
            twice = next(a for a in actions if list(actions).count(a) > 1)
            raise SettingError(f"stage {k} runs {twice} more than once")
        foreign = [a for a in actions if not 0 <= a.micro_batch < micro_batches]
        if foreign:
            raise SettingError(f"stage {k} runs {foreign[0]}, but there are {micro_batches} micro-batches")
        for turn in range(turns):
            for i in range(micro_batches):
                _check_one(k, place, turn, i, train)


def _whole(actions: Sequence[Action], turns: int, micro_batches: int, train: bool) -> bool:
    """Returns whether a stage does each micro-batch in each of its cells once, in order, and nothing else."""
    kinds: dict[tuple[int, int], str] = {}
    for action in actions:
        one = action.turn, action.micro_batch
        kinds[one] = kinds.get(one, "") + action.kind
    if len(kinds) != turns * micro_batches or not set(kinds.values()) <= (_TRAINED if train else _EVALUATED):
        return False
    return all(0 <= turn < turns and 0 <= i < micro_batches for turn, i in kinds)


_TRAINED, _EVALUATED = {"FB", "FRB", "FBW", "FRBW"}, {"F"}


def _check_one(k: int, place: Mapping[Action, int], turn: int, i: int, train: bool) -> None:
    """Checks what a stage does with one micro-batch in one of its cells."""
    forward, again, backward, put_off = (place.get(Action(kind, i, turn)) for kind in ("F", "R", "B", "W"))
    named = str(Action("F", i, turn))[1:]
    if forward is None or (train and backward is None):
        raise SettingError(f"stage {k} never runs {'F' if forward is None else 'B'}{named}")
    if not train and (again is not None or backward is not None or put_off is not None):
        raise SettingError(f"stage {k} runs a rebuild or backward of micro-batch {named} in an evaluation")
    order = [at for at in (forward, again, backward, put_off) if at is not None]
    if order != sorted(order):
        raise SettingError(
            f"stage {k} runs micro-batch {named} out of order: it must be F{named}, then R{named} if any, "
            f"then B{named}, then W{named} if any"
        )


def _check_message_order(schedule: Sequence[Sequence[Action]], turns: int) -> None:
    """Cells must agree on the order of the messages between them: a link delivers in the order of sending."""
    orders: list[dict[tuple[str, int], list[int]]] = [{} for _ in schedule]
    for order, actions in zip(orders, schedule, strict=True):
        for action in actions:
            order.setdefault((action.kind, action.turn), []).append(action.micro_batch)
    for (k, turn), (next_k, next_turn) in _neighbours(len(schedule), turns):
        for kind, what in (("F", "activations"), ("B", "gradients")):
            here, there = orders[k].get((kind, turn), []), orders[next_k].get((kind, next_turn), [])
            if here != there:
                raise SettingError(f"stages {k} and {next_k} disagree on the order of {what}: {here} against {there}")


def _neighbours(stages: int, turns: int) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Yields (stage, turn) of every cell but the last, and of the cell behind it."""
    for at in range(stages * turns - 1):
        yield (at % stages, at // stages), ((at + 1) % stages, (at + 1) // stages)
