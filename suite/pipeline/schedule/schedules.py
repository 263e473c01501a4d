"""Schedules: for each stage the ordered list of its actions. Each generator's docstring shows its picture.

Messages are not separate actions: ``F`` receives its input from the previous cell and sends its output to the next one,
``B`` and ``I`` do the same with gradients in the other direction. Generated schedules have ``R`` right before its
backward. Only the backward waits for the gradient, so a stage recomputes while the gradient is in transit.
``suite.pipeline.schedule.remat`` decides which micro-batches are recomputed. Schedules on a V are in ``v_schedules``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import zip_longest

from suite.pipeline.model.cells import CellPlacement
from suite.pipeline.schedule.action import Action, ActionKind, Schedule
from suite.pipeline.schedule.flow_control import FlowControl
from suite.pipeline.schedule.play import Play, Route


def fill_drain(stages: int, micro_batches: int) -> Schedule:
    """Returns the paper's schedule (figure 2c and section 2.3). The picture also shows the recomputes that
    ``remat.with_recomputes`` inserts; the function returns only F and B:

        stage 0   F0 F1 F2 F3 .  .  .  .  B3 R2 B2 R1 B1 R0 B0
        stage 1   .  F0 F1 F2 F3 .  .  B3 R2 B2 R1 B1 R0 B0
        stage 2   .  .  F0 F1 F2 F3 B3 R2 B2 R1 B1 R0 B0

    All forwards, then all backwards from last to first, so the graph of the last forward is still alive. No stage waits
    for a gradient before it has sent its last activation, and gradients are sent and used in one order: no deadlock.
    """
    fill = [Action("F", i) for i in range(micro_batches)]
    drain = [Action("B", i) for i in reversed(range(micro_batches))]
    return [fill + drain for _ in range(stages)]


def one_forward_one_backward(stages: int, micro_batches: int) -> Schedule:
    """Returns 1F1B (PipeDream-Flush; Narayanan et al., 2021):

        stage 0   F0 F1 F2 .  .  B0 F3 B1 F4 B2 .  B3 .  B4
        stage 1   .  F0 F1 .  B0 F2 B1 F3 B2 F4 B3 .  B4
        stage 2   .  .  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4

    Takes the same time as fill-drain, but stage k never holds more than K - k micro-batches.
    """
    forwards, backwards = ([Action(kind, i) for i in range(micro_batches)] for kind in ("F", "B"))
    return [
        forwards[:ahead] + [each for pair in zip_longest(backwards, forwards[ahead:]) for each in pair if each]
        for ahead in range(stages, 0, -1)
    ]


def interleaved(stages: int, micro_batches: int, virtual_stages: int) -> Schedule:
    """Returns interleaved 1F1B (Narayanan et al., 2021): each stage holds ``virtual_stages`` cells; the v-th cell of
    stage k is cell v * K + k of the model.

        stage 0   F0   F1   F0.1 F1.1 F2   B0.1 F3   B1.1 F2.1 B0   F3.1 B1   .    B2.1 .    B3.1 B2   B3
        stage 1   .    F0   F1   F0.1 B0.1 F1.1 B1.1 F2   B0   F3   B1   F2.1 B2.1 F3.1 B3.1 B2   B3

    Micro-batches run in groups of K: each group passes all stages once per virtual stage. A cell has 1 /
    ``virtual_stages`` of a stage's layers, so filling and draining the pipeline takes that fraction of the time. The
    last group may be smaller.
    """
    return _greedy(stages, micro_batches, virtual_stages, "B")


def zero_bubble(stages: int, micro_batches: int, virtual_stages: int) -> Schedule:
    """Returns a zero-bubble schedule (Qi et al., 2023, their ZB-H1): ``I`` defers the weight gradients of linear layers
    (all others compute theirs in ``I``), and ``W`` adds the deferred ones in idle time.

        stage 0   F0 F1 F2 .  .  I0 W0 F3 I1 W1 F4 I2 W2 I3 W3 I4 W4
        stage 1   .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 F4 I3 W2 I4 W3 W4
        stage 2   .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 F4 I4 W2 W3 W4

    Stage k runs at most K - k forwards ahead of its backwards, as in 1F1B, and at most K ahead of its weight gradients.
    In equal units of time a step of M >= 2K - 1 takes M (F + I + W) + (K - 1) F, which is optimal for schedules that
    begin at stage 0.

    With several ``virtual_stages`` it is also interleaved. On every stage forwards run at most as far ahead
    of weight gradients as stage 0's forwards run ahead of its backwards:

        stage 0   F0   F1   F0.1 F1.1 F2   I0.1 W0.1 I1.1 F2.1 I0   I1   W1.1 W0   I2.1 W1   I2   W2.1 W2
        stage 1   .    F0   F1   F0.1 I0.1 F1.1 I1.1 F2   I0   I1   W0.1 F2.1 I2.1 W1.1 I2   W0   W1   W2.1 W2
    """
    return _greedy(stages, micro_batches, virtual_stages, "I")


def one_by_one(stages: int, micro_batches: int, virtual_stages: int, recomputes: bool) -> Schedule:
    """Returns a schedule with one micro-batch at a time in the pipeline; no order of one cell per stage holds less.
    With ``recomputes`` a stage also holds one graph at a time:

        stage 0   F0   .    F0.1 .    .    B0.1 R0   B0   F1   ..
        stage 1   .    F0   .    F0.1 B0.1 R0   B0   .    .    ..
    """
    actions, last = [], virtual_stages - 1
    for i in range(micro_batches):
        actions += [Action("F", i, cell) for cell in range(virtual_stages)]
        for cell in reversed(range(virtual_stages)):
            kinds: tuple[ActionKind, ...] = ("R", "B") if recomputes and cell < last else ("B",)
            actions += [Action(kind, i, cell) for kind in kinds]
    return [actions for _ in range(stages)]


def _greedy(stages: int, micro_batches: int, virtual_stages: int, backward: ActionKind) -> Schedule:
    """Plays all stages. A free stage runs its next forward if it may and the input has arrived, else its next backward,
    of kind ``backward``, if the gradient has arrived, else its next deferred weight gradient."""
    groups = [range(begin, min(begin + stages, micro_batches)) for begin in range(0, micro_batches, stages)]
    cells = range(virtual_stages)
    forwards = [Action("F", i, cell) for group in groups for cell in cells for i in group]
    backwards = [Action(backward, i, cell) for group in groups for cell in reversed(cells) for i in group]
    defers = backward == "I"
    counts = [{1: 0, -1: 0, 0: 0} for _ in range(stages)]  # by direction; 0 counts weight gradients
    # how far each stage's forwards may run ahead of its backwards
    ahead = [stages - k for k in range(stages)]
    if virtual_stages > 1:
        ahead = [2 * each + (virtual_stages - 1) * stages - 1 for each in ahead]

    def next_action(k: int, has_arrived: Callable[[Action], bool]) -> Action | None:
        count = counts[k]
        allowed = count[1] - count[-1] < ahead[k] and not (defers and count[1] - count[0] >= ahead[0])
        if count[1] < len(forwards) and allowed and has_arrived(forwards[count[1]]):
            action = forwards[count[1]]
        elif count[-1] < count[1] and has_arrived(backwards[count[-1]]):
            action = backwards[count[-1]]
        elif defers and count[0] < count[-1]:
            action = replace(backwards[count[0]], kind="W")
        else:
            return None
        count[action.direction] += 1
        return action

    return play_in_units(CellPlacement(stages), stages * virtual_stages, micro_batches, next_action)


NextAction = Callable[[int, Callable[[Action], bool]], Action | None]
"""Returns what a stage runs now, or None to wait; the second argument tells whether an action's input has arrived."""


def play_in_units(placement: CellPlacement, cells: int, micro_batches: int, next_action: NextAction) -> Schedule:
    """Plays all stages in equal units of time, each action one; no message takes time, and no send waits."""
    units, routes = dict.fromkeys("FIBW", [1.0] * cells), [Route(at, at + 1) for at in range(cells - 1)]
    no_limits = FlowControl(micro_batches, micro_batches, 2 * micro_batches + 1)
    player = Play(placement, cells, units, routes, no_limits)

    def choose(k: int, now: float) -> tuple[str, int, int, float] | None:
        def has_arrived(action: Action) -> bool:
            cell = action.cell(k, placement)
            if action.direction < 0 and player.done[1][cell] <= action.micro_batch:
                return False
            start = player.start_of(action.direction, cell, now)
            return start is not None and start <= now

        action = next_action(k, has_arrived)
        if action is None:
            return None
        cell = action.cell(k, placement)
        player.come_to(action.direction, cell, now)
        return action.kind, cell, action.micro_batch, now

    player.play(choose)
    forwards, backwards = player.done[1], player.done[-1]
    assert forwards == backwards == [micro_batches] * cells, f"no stage goes on after {forwards}, {backwards}"
    return player.schedule()
