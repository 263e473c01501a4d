"""Plays a policy: a schedule of given cells in given memory, action by action.

A free stage runs the first action in its order that the policy, its messages and its memory allow, in real seconds
(``suite.pipeline.schedule.play``) and real bytes (``stage_bytes``). What is played runs and fits; a policy after which
no stage can go on makes no schedule.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from suite.pipeline.model.cells import CellPlacement
from suite.pipeline.model.topology import TransportName
from suite.pipeline.planning.simulate import CellCost, Link, Links, routes_of, seconds_of
from suite.pipeline.planning.stage_bytes import CellBytes, StageBytes, update_bytes
from suite.pipeline.schedule.flow_control import FlowControl, flow_control
from suite.pipeline.schedule.play import DIRECTIONS, Play


@dataclass(frozen=True)
class CellsProblem:
    """Cells to be scheduled."""

    placement: CellPlacement
    micro_batches: int
    costs: Sequence[CellCost]
    """In the order of the model."""
    link: Link | Links
    stage_bytes: Sequence[Sequence[CellBytes]]
    """The bytes of each stage's cells."""
    limit_bytes: int
    """What a stage may need at most."""
    transport: TransportName = "gloo"
    may_recompute: bool = True
    """Whether graphs may be dropped."""

    @cached_property
    def flow(self) -> FlowControl:
        return flow_control(self.transport, self.placement.stages, len(self.costs) // self.placement.stages)

    def message_s(self, source: int, target: int, size: int) -> float:
        """Returns the seconds of a message from one cell to another; 0 if both are on one stage."""
        if not self.placement.crosses(source, target):
            return 0.0
        return self.link.between(self.placement.stage_of(source), self.placement.stage_of(target)).seconds(size)

    @cached_property
    def own(self) -> list[Sequence[int]]:
        """The cells of each stage."""
        return [self.placement.on_stage(k, range(len(self.costs))) for k in range(self.placement.stages)]


@dataclass(frozen=True)
class Policy:
    """How free stages choose their next action; numbers of micro-batches for each cell, but for the last three."""

    ahead: tuple[int, ...]
    """How far forwards may run ahead of backwards."""
    graphs: tuple[int, ...]
    """The most graphs that are kept at once."""
    first_split: tuple[int, ...]
    """How many backwards at the beginning defer their weight gradients."""
    last_split: tuple[int, ...]
    """How many at the end do."""
    order: tuple[tuple[tuple[str, int], ...], ...]
    """The choices of each stage: kinds and cells, the first choice first."""
    drops: bool = False
    """Whether a forward whose graph has no room runs without, to be recomputed; else it waits for room."""
    patience: float = 0.1
    """The share of an action's time for which a stage rather waits for a better choice that it knows will come."""


class PolicyPlayer:
    """A policy that is played."""

    def __init__(self, problem: CellsProblem, policy: Policy, below_s: float = math.inf) -> None:
        """Gives up when the step cannot take less than ``below_s``: then ``step_s`` is infinite."""
        self._problem, self._policy, count = problem, policy, problem.micro_batches
        self._below_s = below_s
        routes = routes_of(problem.costs, problem.link, problem.placement)
        self._seconds = seconds_of(problem.costs)
        self.play = Play(problem.placement, len(problem.costs), self._seconds, routes, problem.flow)
        self._stages = [StageBytes(cells, count, problem.flow) for cells in problem.stage_bytes]
        self.was_refused = False
        """Whether an action had to wait for memory, or ran in a way that takes less of it."""
        cells = range(len(problem.costs))
        self._dropped: list[deque[int]] = [deque() for _ in cells]
        """The micro-batches to recompute."""
        self._deferred: list[deque[int]] = [deque() for _ in cells]
        """Those whose weight gradients are deferred."""
        self._graphs = [0 for _ in cells]
        forward, dropped, backward, split, weight_grad = (self._seconds[kind] for kind in "FfBIW")
        self._forward_s = [*map(min, forward, dropped)]
        self._backward_s = [min(backward[at], split[at] + weight_grad[at]) for at in cells]
        self._left_s = [count * sum(self._forward_s[at] + self._backward_s[at] for at in own) for own in problem.own]
        """The least seconds of what each stage has yet to do."""
        if all(update_bytes(cells) <= problem.limit_bytes for cells in problem.stage_bytes):
            self.play.play(self._choose)
        is_done = all(done == count for direction in (1, -1) for done in self.play.done[direction])
        self.step_s = max(self.play.free) if is_done and not any(self._deferred) else math.inf
        self.score = self.step_s, sum(self.play.free)

    def _choose(self, k: int, now: float) -> tuple[str, int, int, float] | float | None:
        known, play = math.inf, self.play
        if now + self._left_s[k] > self._below_s:
            play.stop()
            return None
        for kind, at in self._policy.order[k]:
            if not self._is_next(kind, at):
                continue
            if kind in "FB":
                start = play.start_of(DIRECTIONS[kind], at, play.free[k])
                if start is None:
                    continue
                if start > now:
                    known = min(known, start)
                    continue
            if known - now < self._policy.patience * self._seconds[kind][at]:
                continue
            for each in self._ways(kind, at):
                if self._fits(each, at):
                    play.come_to(DIRECTIONS[each], at, play.free[k])
                    return each, at, self._run(each, at), now
                self.was_refused = True
        return known if known < math.inf else None

    def _is_next(self, kind: str, at: int) -> bool:
        """Whether a cell has an action of a kind to run next, once its messages are there."""
        forwards, backwards = self.play.done[1][at], self.play.done[-1][at]
        if kind == "F":
            return forwards < self._problem.micro_batches and forwards - backwards < self._policy.ahead[at]
        if kind == "W":
            return bool(self._deferred[at])
        is_dropped = bool(self._dropped[at]) and self._dropped[at][0] == backwards
        return backwards < forwards and is_dropped == (kind == "R")

    def _ways(self, kind: str, at: int) -> str:
        """Returns the kinds in which a forward or backward may run, the first choice first."""
        policy, backwards = self._policy, self.play.done[-1][at]
        if kind == "F" and self._problem.may_recompute:
            return ("Ff" if policy.drops else "F") if self._graphs[at] < policy.graphs[at] else "f"
        if kind == "B" and self._problem.costs[at].weight_grad_s:
            is_last = self._problem.micro_batches - backwards <= policy.last_split[at]
            return "IB" if is_last or backwards < policy.first_split[at] else "BI"
        return kind

    def _run(self, kind: str, at: int) -> int:
        """Counts an action; returns its micro-batch."""
        stage, seconds = self.play.cell_to_stage[at], self._seconds
        self._stages[stage].run(kind, self.play.virtual_stage[at])
        self._graphs[at] += (kind in "FR") - (kind in "IB")
        forwards, backwards = self.play.done[1][at], self.play.done[-1][at]
        if kind in "RW":
            self._left_s[stage] -= seconds[kind][at]
            return (self._dropped if kind == "R" else self._deferred)[at].popleft()
        if kind in "Ff":
            self._left_s[stage] -= self._forward_s[at]
        else:
            self._left_s[stage] -= self._backward_s[at]
        if kind == "f":
            self._left_s[stage] += seconds["R"][at]
            self._dropped[at].append(forwards)
        elif kind == "I":
            self._left_s[stage] += seconds["W"][at]
            self._deferred[at].append(backwards)
        return forwards if kind in "Ff" else backwards

    def _fits(self, kind: str, at: int) -> bool:
        """Whether an action fits its stage's memory, and a forward or recompute leaves room for the next backward of
        each cell of the stage: otherwise all may wait for memory that nothing frees."""
        stage = self._stages[self.play.cell_to_stage[at]]
        virtual_stage = self.play.virtual_stage[at]
        during, after = stage.with_action(kind, virtual_stage)
        if kind in "FfR":
            after += self._needed_room(kind, at)
        elif kind == "I":
            after += stage.cells[virtual_stage].backward_peak_bytes
        return max(during, after) <= self._problem.limit_bytes

    def _needed_room(self, kind: str, at: int) -> int:
        """Returns the bytes of the next backward of a stage, and of a micro-batch in later cells that have none."""
        stage_at = self.play.cell_to_stage[at]
        needed = most = 0
        for own, cell in zip(self._problem.own[stage_at], self._problem.stage_bytes[stage_at], strict=True):
            forwards, backwards = self.play.done[1][own], self.play.done[-1][own]
            is_empty = forwards == backwards
            if is_empty and own < at:
                continue
            is_dropped = bool(self._dropped[own]) and self._dropped[own][0] == backwards
            lacks_graph = own > at or kind == "f" if is_empty else is_dropped
            graph_bytes = cell.activation_bytes if lacks_graph and (own, kind) != (at, "R") else 0
            gradients = cell.received_gradient_bytes + (0 if backwards else cell.gradient_bytes)
            recompute = cell.graph_peak_bytes - cell.activation_bytes
            most = max(most, graph_bytes + max(recompute, cell.backward_peak_bytes + gradients))
            if is_empty and own > at:
                needed += cell.input_bytes + sum(each.bytes for each in cell.sent if each.cells_downstream > 0)
                most = max(most, cell.forward_peak_bytes)
        return needed + most
