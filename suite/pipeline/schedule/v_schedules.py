"""Schedules on a V of cells (``cells.v_shaped``): stage k owns cell k, on the way down, and 2K - 1 - k, on the way up.

A building block says when the actions of one micro-batch run, and is repeated for each micro-batch. How long a cell
holds a micro-batch there decides how many it holds at once. A cell that holds them long shares its stage with one that
holds them briefly, so all stages need about the same memory (Qi et al., "Pipeline Parallelism with Controllable
Memory", 2024, 2405.15362).

The schedules are squeezed within that memory: each action runs as early as it can, weight gradients in idle time. In
equal units they need the paper's memory and are idle no longer than the paper's, whose numbers are: ZBV 0 (here K - 1
units, the first forwards), V-Half 3K, V-Min 4K.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from suite.pipeline.model.cells import CellPlacement, v_shaped
from suite.pipeline.schedule.action import Action, ActionKind, Schedule
from suite.pipeline.schedule.schedules import play_in_units


def zbv(stages: int, micro_batches: int) -> Schedule:
    """Returns ZBV, a zero-bubble schedule (Qi et al., "Zero Bubble Pipeline Parallelism", 2023, 2401.10241):

        stage 0   F0   F1   F2   F0.1 I0.1 W0.1 F1.1 I0   I1.1 W1.1 W0   F2.1 I2.1 I1   W2.1 I2   W1   W2
        stage 1   .    F0   F0.1 F1   F1.1 I0.1 I0   W0.1 W0   F2   F2.1 I1.1 I1   I2.1 I2   W1.1 W1   W2.1 W2

    A stage holds at most the activations of K micro-batches, as in 1F1B. In equal units a step of M >= 2K - 1 takes
    6 M + K - 1, the least for schedules that begin at stage 0: stage K - 1 is never idle after its first forward.
    """
    limits = _HeldLimits([(2 * stages - 1 - k, k + 1) for k in range(stages)], 2 * stages)
    return _squeezed(_v_half_block(stages), limits, micro_batches)


def v_half(stages: int, micro_batches: int) -> Schedule:
    """Returns V-Half (2405.15362):

        stage 0   F0   F1   .    .    .    F0.1 I0.1 W0.1 .    .    F1.1 I1.1 I0   W1.1 W0   .    I1   W1
        stage 1   .    F0   F1   .    F0.1 .    .    I0.1 W0.1 F1.1 I0   W0   I1.1 W1.1 .    I1   W1
        stage 2   .    .    F0   F0.1 F1   F1.1 .    .    I0.1 I0   W0.1 W0   .    I1.1 I1   W1.1 W1

    A stage holds at most the activations of (K + 2) // 2 micro-batches, about half of ZBV's.
    """
    block = _v_half_block(stages)
    return _squeezed(block, _held(block), micro_batches)


def v_min(stages: int, micro_batches: int) -> Schedule:
    """Returns V-Min (2405.15362):

        stage 0   F0   F1   .    .    .    F0.1 I0.1 W0.1 F1.1 I1.1 W1.1 I0   W0   .    .    I1   W1
        stage 1   .    F0   F1   .    F0.1 .    F1.1 I0.1 W0.1 .    I0   I1.1 W0   W1.1 I1   W1
        stage 2   .    .    F0   F0.1 F1   F1.1 .    .    I0.1 I0   W0.1 W0   I1.1 I1   W1.1 W1

    A stage holds at most the activations of (K + 4) // 3 micro-batches, about a third of ZBV's.
    """
    block = _v_min_block(stages)
    return _squeezed(block, _held(block), micro_batches)


_Block = list[list[dict[ActionKind, int]]]
"""The unit of time of a micro-batch's ``F``, ``I`` and ``W``, by stage and virtual stage."""

_PERIOD = 6
"""The units of time that a micro-batch takes a stage: three actions in each of two cells."""


def _building_block(stages: int, up: int, at_loss: int, at_turn: int) -> _Block:
    """Returns when the actions of one micro-batch run; the next one follows ``_PERIOD`` units later.

        stage 0   F   .   .   F.1 I.1 W.1 .   I   W
        stage 1   .   F   F.1 .   .   I.1 I   .   .   W.1 W         K = 2; up, at_loss and at_turn are 1

    Forwards and backwards reach the next stage after one unit on the way down the V, and after ``up`` on the way up.
    Backwards start ``at_loss`` units after the last forward, and turn at stage K - 1 after ``at_turn``. These three are
    such that no two actions of a stage fall on the same unit modulo ``_PERIOD``.
    """
    last = stages - 1
    turn = last + 1
    loss = turn + up * last + at_loss
    turn_back = loss + last + at_turn
    block: _Block = []
    for k in range(stages):
        cells: list[dict[ActionKind, int]] = [
            {"F": k, "I": turn_back + up * (last - k)},
            {"F": turn + up * (last - k), "I": loss + k},
        ]
        taken = {unit % _PERIOD for cell in cells for unit in cell.values()}
        for cell in reversed(cells):
            later = range(cell["I"] + 1, cell["I"] + _PERIOD)
            cell["W"] = next(unit for unit in later if unit % _PERIOD not in taken)
            taken.add(cell["W"] % _PERIOD)
        block.append(cells)
    return block


def _v_half_block(stages: int) -> _Block:
    return _building_block(stages, up=2, at_loss=1 if stages % 2 else 4, at_turn=2)


def _v_min_block(stages: int) -> _Block:
    return _building_block(stages, up=1, at_loss=1 if stages % 3 else 3, at_turn=1)


@dataclass(frozen=True)
class _HeldLimits:
    """How many micro-batches a stage may hold at once, each from its ``F`` to its ``W``."""

    in_cells: Sequence[tuple[int, int]]
    """In each cell, by stage."""
    in_stage: int
    """In both cells of a stage together. More than in one cell, so each cell can always hold one: no deadlock."""


def _held(block: _Block) -> _HeldLimits:
    """Returns how many the stages hold if the block repeats forever."""

    def held(cell: dict[ActionKind, int], unit: int) -> int:
        return (unit - cell["F"]) // _PERIOD - (unit - cell["W"] - 1) // _PERIOD

    units = range(_PERIOD)
    in_cells = [(max(held(down, unit) for unit in units), max(held(up, unit) for unit in units)) for down, up in block]
    return _HeldLimits(in_cells, max(held(down, unit) + held(up, unit) for down, up in block for unit in units))


def _squeezed(block: _Block, limits: _HeldLimits, micro_batches: int) -> Schedule:
    """Plays all stages. Of the actions whose input has arrived, a free stage runs the one that is first where the block
    repeats: a forward only within the limits, a weight gradient only if nothing else can run."""
    counts = [[dict.fromkeys(cell, 0) for cell in cells] for cells in block]

    def next_action(k: int, has_arrived: Callable[[Action], bool]) -> Action | None:
        held = [count["F"] - count["W"] for count in counts[k]]
        left: list[Action] = []
        for virtual_stage, count in enumerate(counts[k]):
            has_room = held[virtual_stage] < limits.in_cells[k][virtual_stage] and sum(held) < limits.in_stage
            ends = {"F": micro_batches if has_room else 0, "I": count["F"], "W": count["I"]}
            left += (Action(kind, i, virtual_stage) for kind, i in count.items() if i < ends[kind])
        left.sort(key=lambda action: (action.kind == "W", repeated(k, action)))
        first = next(filter(has_arrived, left), None)
        if first is not None:
            counts[k][first.virtual_stage][first.kind] += 1
        return first

    def repeated(k: int, action: Action) -> int:
        return block[k][action.virtual_stage][action.kind] + _PERIOD * action.micro_batch

    stages = len(block)
    return play_in_units(CellPlacement(stages, v_shaped(stages)), 2 * stages, micro_batches, next_action)
