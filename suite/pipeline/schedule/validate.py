"""Checks a schedule before it runs: each stage's order, the order of messages, and that there is no deadlock.

Activations go from each cell to the next, gradients back; ``CellPlacement`` says which stage has which cell.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise

from suite.errors import SettingError
from suite.pipeline.model.cells import CellPlacement
from suite.pipeline.model.topology import CellPair, TransportName
from suite.pipeline.schedule.action import KINDS, Action, virtual_stages_of
from suite.pipeline.schedule.flow_control import flow_control
from suite.pipeline.schedule.play import DIRECTIONS, Played, Route, play
from suite.pipeline.schedule.timeline import Span

DRAWN_STAGES, DRAWN_UNITS = 16, 40
"""The largest picture in an error message: stages, and units of time before the deadlock."""


def validate(
    schedule: Sequence[Sequence[Action]],
    micro_batches: int,
    train: bool = True,
    transport: TransportName = "gloo",
    pairs: Collection[CellPair] = (),
    cell_to_stage: tuple[int, ...] = (),
) -> list[list[Span]]:
    """Plays a schedule as fast as its messages allow; returns the spans of each stage, each action one unit of time.

    In each of its cells every stage must run each micro-batch's ``F`` once and, to train, its ``B``, or ``I`` and later
    ``W``, once after it with at most one ``R`` between. Messages between two cells arrive in the order in which they
    were sent. No stage may wait forever, neither for a message nor because too many of its sends are in flight.
    ``pairs`` are the cells that exchange messages, only neighbours if empty; ``cell_to_stage`` as in ``CellPlacement``.

    Raises SettingError with the faulty stage and action, or with the timeline up to the deadlock, cut to at most
    DRAWN_STAGES by DRAWN_UNITS cells around it.
    """
    virtual_stages = virtual_stages_of(schedule)
    _check_each_stage(schedule, virtual_stages, micro_batches, train)
    placement = CellPlacement(len(schedule), cell_to_stage)
    _check_message_order(schedule, virtual_stages, placement)
    if not any(schedule):  # a replica without micro-batches
        return [[] for _ in schedule]
    cells = len(schedule) * virtual_stages
    flow = flow_control(transport, len(schedule), virtual_stages)
    routes = [Route(*pair) for pair in sorted({*pairwise(range(cells)), *pairs})]
    played = play(schedule, dict.fromkeys(DIRECTIONS, [1.0] * cells), routes, flow, cell_to_stage)
    if played.stuck:
        raise SettingError(_deadlock(played, flow.max_inflight_sends))
    return played.rows


def draw(timeline: Sequence[Sequence[str]], first_stage: int = 0) -> str:
    """Returns the timeline as text, a row a stage, starting at ``first_stage``."""
    width = max((len(cell) for row in timeline for cell in row), default=1)
    return "\n".join(
        f"stage {k:<3} " + " ".join(cell.ljust(width) for cell in row) for k, row in enumerate(timeline, first_stage)
    )


def texts_by_unit(rows: Sequence[Sequence[Span]]) -> list[list[str]]:
    """Returns the text of each stage and unit of time; a dot means that the stage waits."""
    length = max((int(row[-1].end) for row in rows if row), default=0)
    timeline = [["."] * length for _ in rows]
    for texts, row in zip(timeline, rows, strict=True):
        for span in row:
            texts[int(span.start)] = str(span)
    return timeline


def _deadlock(played: Played, sends_in_flight: int) -> str:
    """Returns the message of a deadlock: which stages wait at which action, and the timeline around it."""
    stuck, timeline = played.stuck, texts_by_unit(played.rows)
    center = _deadlock_center(stuck)
    stages = len(timeline)
    first = max(0, min(center + 1 - DRAWN_STAGES // 2, stages - DRAWN_STAGES))
    drawn = range(first, min(stages, first + DRAWN_STAGES))
    text = ", ".join(f"stage {k} at {stuck[k]}" for k in drawn if k in stuck)
    others = len(stuck) - sum(k in stuck for k in drawn)
    text = f"the schedule deadlocks: {text}{f' and {others} other stages' if others else ''} wait for each other"
    if played.full:
        names = ", ".join(map(str, played.full[:DRAWN_STAGES]))
        text += (
            f"; at stage {names} more than {sends_in_flight} messages would be in flight, so let no stage run as far "
            "ahead, or use pipeline.schedule=auto"
        )
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


_TRAINED, _EVALUATED = {"FB", "FRB", "FIW", "FRIW"}, {"F"}
"""The legal orders of a micro-batch's actions in a cell."""


def _check_each_stage(
    schedule: Sequence[Sequence[Action]], virtual_stages: int, micro_batches: int, train: bool
) -> None:
    legal = _TRAINED if train else _EVALUATED
    if micro_batches > (longest := max(map(len, schedule))):
        raise SettingError(f"there are {micro_batches:,} micro-batches, and no stage has more than {longest} actions")
    expected = {(virtual_stage, i) for virtual_stage in range(virtual_stages) for i in range(micro_batches)}
    for k, actions in enumerate(schedule):
        orders: dict[tuple[int, int], str] = {}  # the kinds of each micro-batch in each cell
        for action in actions:
            key = action.virtual_stage, action.micro_batch
            orders[key] = orders.get(key, "") + action.kind
        if orders.keys() == expected and legal.issuperset(orders.values()):
            continue
        unknown = [a for a in actions if a.kind not in KINDS or a.virtual_stage < 0]
        if unknown:
            raise SettingError(f"stage {k} runs {unknown[0]}, which is no action; actions look like F3, R3, I3, B3, W3")
        if len(set(actions)) != len(actions):
            repeated = next(a for a in actions if list(actions).count(a) > 1)
            raise SettingError(f"stage {k} runs {repeated} more than once")
        out_of_range = [a for a in actions if not 0 <= a.micro_batch < micro_batches]
        if out_of_range:
            raise SettingError(f"stage {k} runs {out_of_range[0]}, but there are {micro_batches} micro-batches")
        for key in sorted(expected):
            _check_micro_batch(k, *key, orders.get(key, ""), train)


def _check_micro_batch(k: int, virtual_stage: int, i: int, order: str, train: bool) -> None:
    """Checks the kinds of a stage's actions for one micro-batch in one of its cells."""
    name = str(Action("F", i, virtual_stage))[1:]
    if not train and order.strip("F"):
        raise SettingError(f"stage {k} runs a recompute or backward of micro-batch {name} in an evaluation")
    required = "F" if not train else "FIW" if "I" in order or "W" in order else "FB"
    for kind in required:
        if kind not in order:
            raise SettingError(f"stage {k} never runs {kind}{name}")
    if order not in (_TRAINED if train else _EVALUATED):
        raise SettingError(
            f"stage {k} runs micro-batch {name} out of order: it must be F{name}, then R{name} if any, "
            f"then B{name}, or I{name} and later W{name}"
        )


def _check_message_order(schedule: Sequence[Sequence[Action]], virtual_stages: int, placement: CellPlacement) -> None:
    """Cells must agree on the order of the messages between them: a link delivers in the order of sending."""
    orders = message_orders(schedule, placement)
    for cell in range(len(schedule) * virtual_stages - 1):
        for direction, what in ((1, "activations"), (-1, "gradients")):
            own_order, next_order = orders.get((direction, cell), []), orders.get((direction, cell + 1), [])
            if own_order != next_order:
                here, there = placement.stage_of(cell), placement.stage_of(cell + 1)
                raise SettingError(
                    f"stages {here} and {there} disagree on the order of {what}: {own_order} against {next_order}"
                )


def message_orders(schedule: Sequence[Sequence[Action]], placement: CellPlacement) -> dict[tuple[int, int], list[int]]:
    """Returns the micro-batches of all actions in order, by their direction and cell."""
    orders: dict[tuple[int, int], list[int]] = {}
    local_cells = range(virtual_stages_of(schedule))
    for k, actions in enumerate(schedule):
        cells = [placement.cell_of(virtual_stage, k) for virtual_stage in local_cells]
        for action in actions:
            orders.setdefault((action.direction, cells[action.virtual_stage]), []).append(action.micro_batch)
    return orders
