"""Checks a schedule before it runs: each stage's order, the order of messages, and that there is no deadlock.

Cell v * K + k is the v-th of stage k. Activations go from each cell to the next, gradients back. So the cell behind one
of stage K - 1 is the next cell of stage 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from suite.errors import SettingError
from suite.pipeline.schedule.action import KINDS, Action, virtual_stages_of
from suite.pipeline.schedule.flow_control import PREPOSTED_RECVS, max_inflight_sends

DRAWN_STAGES, DRAWN_UNITS = 16, 40
"""The largest picture in an error message: stages, and units of time before the deadlock."""


def validate(schedule: Sequence[Sequence[Action]], micro_batches: int, train: bool = True) -> list[list[str]]:
    """As ``check``, but returns the timeline: a text for each stage and unit of time."""
    return _timeline(schedule, check(schedule, micro_batches, train))


def check(schedule: Sequence[Sequence[Action]], micro_batches: int, train: bool = True) -> list[list[int]]:
    """Plays a schedule as fast as its messages allow; returns the unit of time of each action, a list a stage.

    In each of its cells every stage must run each micro-batch's ``F`` once and, to train, its ``B``, or ``I`` and later
    ``W``, once after it with at most one ``R`` between. No stage may wait forever, neither for a message nor because
    too many of its sends are in flight (``suite.pipeline.runtime.p2p``). Messages between two cells arrive in the order
    in which they were sent.

    Raises SettingError with the faulty stage and action, or with the timeline up to the deadlock, cut
    to at most DRAWN_STAGES by DRAWN_UNITS cells around it.
    """
    virtual_stages = virtual_stages_of(schedule)
    _check_each_stage(schedule, virtual_stages, micro_batches, train)
    _check_message_order(schedule, virtual_stages)
    playback = _Playback(schedule, virtual_stages)
    playback.play()
    stuck = {
        k: actions[len(played)]
        for k, (actions, played) in enumerate(zip(schedule, playback.units, strict=True))
        if len(played) < len(actions)
    }
    if stuck:
        raise SettingError(_deadlock(stuck, playback, _timeline(schedule, playback.units)))
    return playback.units


def draw(timeline: Sequence[Sequence[str]], first_stage: int = 0) -> str:
    """Returns the timeline as text, a row a stage, starting at ``first_stage``."""
    width = max((len(cell) for row in timeline for cell in row), default=1)
    return "\n".join(
        f"stage {k:<3} " + " ".join(cell.ljust(width) for cell in row) for k, row in enumerate(timeline, first_stage)
    )


@dataclass
class _Cell:
    """The actions and messages of one cell so far."""

    ran: dict[int, list[int]] = field(default_factory=lambda: {1: [], 0: [], -1: []})
    """The units of time in which it ran actions, by the direction of their messages; 0: no messages."""
    sent: list[tuple[int, int, int]] = field(default_factory=list)
    """Its messages: target cell, direction, index among these. Direction 0 is the metadata, which goes first."""


class _Playback:
    """Plays all stages, each action as early as possible, until all are done or wait forever.

    Cells agree on the order of their messages, so the n-th forward of a cell receives what the n-th of the previous
    cell sent. Counting is enough to know what has arrived.
    """

    def __init__(self, schedule: Sequence[Sequence[Action]], virtual_stages: int) -> None:
        self._schedule, self._stages = schedule, len(schedule)
        self.max_inflight_sends = max_inflight_sends(self._stages, virtual_stages)
        count = self._stages * virtual_stages
        self._cells = [_Cell(sent=[(at + 1, 0, 0)] if at < count - 1 else []) for at in range(count)]
        self.units: list[list[int]] = [[] for _ in schedule]
        """The unit of time of each action, a list a stage."""
        self.full: set[int] = set()
        """Stages that wait because too many of their sends are in flight."""

    def play(self) -> None:
        runnable = list(range(self._stages))
        while runnable:
            k = runnable.pop()
            begun = len(self.units[k])
            while len(self.units[k]) < len(self._schedule[k]) and self._act(k):
                pass
            if len(self.units[k]) > begun:  # a neighbour may wait for what it sent or received
                runnable += {(k - 1) % self._stages, (k + 1) % self._stages} - {k}

    def _act(self, k: int) -> bool:
        """Plays the next action of a stage; returns False if it must wait."""
        action, played = self._schedule[k][len(self.units[k])], self.units[k]
        at = action.virtual_stage * self._stages + k
        cell, direction = self._cells[at], action.direction
        source = self._neighbour(at, -direction)
        self.full.discard(k)
        if played and not self._send_completed(k):
            self.full.add(k)
            return False
        unit = played[-1] + 1 if played else 0
        ran = cell.ran[direction]
        if source is not None:
            arrived = self._cells[source].ran[direction]
            if len(ran) == len(arrived):
                return False
            unit = max(unit, arrived[len(ran)] + 1)
        target = self._neighbour(at, direction)
        if target is not None:
            cell.sent.append((target, direction, len(ran)))
        played.append(unit)
        ran.append(unit)
        return True

    def _neighbour(self, at: int, direction: int) -> int | None:
        """Returns the next cell in a direction, None behind either end and for direction 0."""
        return at + direction if direction and 0 <= at + direction < len(self._cells) else None

    def _send_completed(self, k: int) -> bool:
        """Returns whether a stage may continue after its last send: the oldest in flight must have a posted receive.

        Receives of a cell are posted when its stage reaches its first action, and then ``PREPOSTED_RECVS`` ahead.
        """
        last = self._schedule[k][len(self.units[k]) - 1]
        sent = self._cells[last.virtual_stage * self._stages + k].sent
        if not last.direction or len(sent) <= self.max_inflight_sends:
            return True
        target, direction, number = sent[-1 - self.max_inflight_sends]
        return self._cell_started(target) and (
            not direction or len(self._cells[target].ran[direction]) > number - PREPOSTED_RECVS
        )

    def _cell_started(self, at: int) -> bool:
        k, virtual_stage = at % self._stages, at // self._stages
        if virtual_stage == 0 or self._cells[at].ran[1]:
            return True
        reached = len(self.units[k])
        return reached < len(self._schedule[k]) and self._schedule[k][reached].virtual_stage == virtual_stage


def _timeline(schedule: Sequence[Sequence[Action]], units: Sequence[Sequence[int]]) -> list[list[str]]:
    """Returns the text of each stage and unit of time; a dot means that the stage waits."""
    length = max((played[-1] + 1 for played in units if played), default=0)
    timeline = [["."] * length for _ in schedule]
    for row, actions, played in zip(timeline, schedule, units, strict=True):
        for action, unit in zip(actions, played, strict=False):  # a stuck stage has not played all of them
            row[unit] = str(action)
    return timeline


def _deadlock(stuck: Mapping[int, Action], playback: _Playback, timeline: Sequence[Sequence[str]]) -> str:
    """Returns the message of a deadlock: which stages wait at which action, and the timeline around it."""
    center = _deadlock_center(stuck)
    stages = len(timeline)
    first = max(0, min(center + 1 - DRAWN_STAGES // 2, stages - DRAWN_STAGES))
    drawn = range(first, min(stages, first + DRAWN_STAGES))
    text = ", ".join(f"stage {k} at {stuck[k]}" for k in drawn if k in stuck)
    others = len(stuck) - sum(k in stuck for k in drawn)
    text = f"the schedule deadlocks: {text}{f' and {others} other stages' if others else ''} wait for each other"
    if playback.full:
        names = ", ".join(map(str, sorted(playback.full)[:DRAWN_STAGES]))
        text += f"; at stage {names} more than {playback.max_inflight_sends} messages would be in flight"
    end = max((unit + 1 for k in drawn for unit, cell in enumerate(timeline[k]) if cell != "."), default=0)
    start = max(0, end - DRAWN_UNITS)
    if len(drawn) < stages or start:
        text += f"; shown are stages {drawn[0]} to {drawn[-1]} of {stages} and their last {end - start} units of time"
    return f"{text}\n{draw([timeline[k][start:end] for k in drawn], first)}"


def _deadlock_center(stuck: Mapping[int, Action]) -> int:
    """Returns a stage that waits for a gradient while the next one waits for an activation, or else any stuck stage."""
    for k, action in stuck.items():
        if action.direction < 0 and k + 1 in stuck and stuck[k + 1].kind == "F":
            return k
    return next(iter(stuck))


def _check_each_stage(
    schedule: Sequence[Sequence[Action]], virtual_stages: int, micro_batches: int, train: bool
) -> None:  # fmt: skip
    for k, actions in enumerate(schedule):
        if _is_complete(actions, virtual_stages, micro_batches, train):
            continue
        unknown = [a for a in actions if a.kind not in KINDS or a.virtual_stage < 0]
        if unknown:
            raise SettingError(f"stage {k} runs {unknown[0]}, which is no action; actions look like F3, R3, I3, B3, W3")
        position = {action: at for at, action in enumerate(actions)}
        if len(position) != len(actions):
            repeated = next(a for a in actions if list(actions).count(a) > 1)
            raise SettingError(f"stage {k} runs {repeated} more than once")
        out_of_range = [a for a in actions if not 0 <= a.micro_batch < micro_batches]
        if out_of_range:
            raise SettingError(f"stage {k} runs {out_of_range[0]}, but there are {micro_batches} micro-batches")
        for virtual_stage in range(virtual_stages):
            for i in range(micro_batches):
                _check_micro_batch(k, position, virtual_stage, i, train)


def _is_complete(actions: Sequence[Action], virtual_stages: int, micro_batches: int, train: bool) -> bool:
    """Returns whether a stage runs each micro-batch in each of its cells once, in order, and nothing else."""
    kinds: dict[tuple[int, int], str] = {}
    for action in actions:
        key = action.virtual_stage, action.micro_batch
        kinds[key] = kinds.get(key, "") + action.kind
    if len(kinds) != virtual_stages * micro_batches or not set(kinds.values()) <= (_TRAINED if train else _EVALUATED):
        return False
    return all(0 <= virtual_stage < virtual_stages and 0 <= i < micro_batches for virtual_stage, i in kinds)


_TRAINED, _EVALUATED = {"FB", "FRB", "FIW", "FRIW"}, {"F"}


def _check_micro_batch(k: int, position: Mapping[Action, int], virtual_stage: int, i: int, train: bool) -> None:
    """Checks the actions of a stage for one micro-batch in one of its cells."""
    kinds = {kind: at for kind in KINDS if (at := position.get(Action(kind, i, virtual_stage))) is not None}  # type: ignore[arg-type]
    name = str(Action("F", i, virtual_stage))[1:]
    if not train and kinds.keys() - {"F"}:
        raise SettingError(f"stage {k} runs a recompute or backward of micro-batch {name} in an evaluation")
    required = "F" if not train else "FIW" if kinds.keys() & {"I", "W"} else "FB"
    for kind in required:
        if kind not in kinds:
            raise SettingError(f"stage {k} never runs {kind}{name}")
    if "".join(sorted(kinds, key=kinds.__getitem__)) not in (_TRAINED if train else _EVALUATED):
        raise SettingError(
            f"stage {k} runs micro-batch {name} out of order: it must be F{name}, then R{name} if any, "
            f"then B{name}, or I{name} and later W{name}"
        )


def _check_message_order(schedule: Sequence[Sequence[Action]], virtual_stages: int) -> None:
    """Cells must agree on the order of the messages between them: a link delivers in the order of sending."""
    orders: list[dict[tuple[int, int], list[int]]] = [{} for _ in schedule]
    for order, actions in zip(orders, schedule, strict=True):
        for action in actions:
            order.setdefault((action.direction, action.virtual_stage), []).append(action.micro_batch)
    for (k, virtual_stage), (next_k, next_virtual_stage) in _neighbours(len(schedule), virtual_stages):
        for direction, what in ((1, "activations"), (-1, "gradients")):
            own_order = orders[k].get((direction, virtual_stage), [])
            next_order = orders[next_k].get((direction, next_virtual_stage), [])
            if own_order != next_order:
                raise SettingError(
                    f"stages {k} and {next_k} disagree on the order of {what}: {own_order} against {next_order}"
                )


def _neighbours(stages: int, virtual_stages: int) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Yields (stage, virtual stage) of every cell but the last, and of the cell behind it."""
    for at in range(stages * virtual_stages - 1):
        yield (at % stages, at // stages), ((at + 1) % stages, (at + 1) // stages)
