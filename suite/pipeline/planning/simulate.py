"""Simulates a schedule with given costs and links: when each stage does what, and how long a step takes.

``suite.pipeline.schedule.playback`` plays it: over a link of long latency receives are posted late, which delays
messages. Not simulated are a step's metadata (three latencies a stage, mostly hidden) and the collectives at its end.

The same lists of actions are validated, drawn, simulated, and run by the executor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from suite.errors import SettingError
from suite.pipeline.model.cells import CellPlacement
from suite.pipeline.planning.costs import MessageCost
from suite.pipeline.schedule.action import Action, of_kind, virtual_stages_of
from suite.pipeline.schedule.flow_control import GLOO, FlowControl
from suite.pipeline.schedule.playback import Playback, Route
from suite.pipeline.schedule.timeline import Span, Timeline


@dataclass(frozen=True, slots=True)
class Link:
    """The cost of a message between neighbouring stages."""

    latency_s: float = 0.0
    bytes_per_s: float = float("inf")

    def seconds(self, size: int) -> float:
        """Returns how long a message of ``size`` bytes takes."""
        return self.latency_s + size / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class Links:
    """The links of a pipeline on several nodes."""

    within_node: Link
    between_nodes: Link
    cuts: frozenset[int]
    """The cuts k, from stage k to k + 1, between nodes (``suite.pipeline.planning.placement``)."""

    def between(self, source: int, target: int) -> Link:
        """Returns the link between two stages."""
        return (
            self.between_nodes
            if self.cuts.intersection(range(min(source, target), max(source, target)))
            else self.within_node
        )


@dataclass(frozen=True, slots=True)
class CellCost:
    """The cost of one cell for one micro-batch: seconds and bytes of its messages."""

    forward_s: float
    recompute_s: float
    backward_s: float
    """The full backward."""
    update_s: float = 0.0
    activation_bytes: int = 0
    """Bytes sent to the next cell."""
    gradient_bytes: int = 0
    """Bytes of gradients sent to the previous cell."""
    far_messages: tuple[MessageCost, ...] = ()
    """Skips to cells beyond the next."""
    weight_grad_s: float = 0.0
    """The part of the backward that can be deferred."""
    split_s: float = 0.0
    """What splitting the backward costs extra."""

    def seconds(self, kind: str, recomputed: bool) -> float:
        """Returns how long an action takes; a forward whose micro-batch is not recomputed records its graph. Raises
        KeyError for an unknown kind."""
        if kind == "F":
            return self.forward_s if recomputed else self.recompute_s
        if kind == "I":
            return self.backward_s + (self.split_s - self.weight_grad_s)
        return {"R": self.recompute_s, "B": self.backward_s, "W": self.weight_grad_s}[kind]

    @property
    def least_seconds(self) -> tuple[float, float, float, float]:
        """The least seconds of a forward, what its graph adds, a backward, and what its weight gradients add."""
        forward, backward = min(self.forward_s, self.recompute_s), min(self.backward_s, self.seconds("I", False))
        return forward, self.recompute_s - forward, backward, self.backward_s - backward


def action_seconds(
    schedule: Sequence[Sequence[Action]], cells: Sequence[CellCost], placement: CellPlacement
) -> Callable[[int, Action], float]:
    """Returns a function of a stage and one of its actions: how long the action takes."""
    recomputed = [of_kind(actions, "R") for actions in schedule]
    own = [placement.on_stage(stage, cells) for stage in range(placement.stages)]

    def seconds(stage: int, action: Action) -> float:
        cost = own[stage][action.virtual_stage]
        return cost.seconds(action.kind, (action.virtual_stage, action.micro_batch) in recomputed[stage])

    return seconds


def simulate(
    schedule: Sequence[Sequence[Action]],
    cells: Sequence[CellCost],
    link: Link | Links = Link(),
    flow: FlowControl = GLOO,
    owners: tuple[int, ...] = (),
) -> Timeline:
    """Returns the timeline of one step; ``cells`` are the costs of the cells, ``flow`` says when receives are posted,
    and ``owners`` which stage owns which cell (``CellPlacement``). The update begins when all stages are done, because
    it needs the global gradient norm.

    Raises SettingError when the schedule deadlocks, or a cost or the link is negative or not finite; ``validate`` finds
    every other error of a schedule.
    """
    _check(schedule, cells, link)
    placement = CellPlacement(len(schedule), owners)
    links = link if isinstance(link, Links) else Links(link, link, frozenset())

    def route(source: int, target: int, activation_bytes: int, gradient_bytes: int) -> Route:
        between = links.between(placement.stage_of(source), placement.stage_of(target))
        rate = between.bytes_per_s
        return Route(source, target, activation_bytes / rate, gradient_bytes / rate, between.latency_s)

    routes = [route(k, k + 1, cells[k].activation_bytes, cells[k + 1].gradient_bytes) for k in range(len(cells) - 1)]
    routes += [
        route(k, far.to, far.activation_bytes, far.gradient_bytes)
        for k, cell in enumerate(cells)
        for far in cell.far_messages
        if placement.crosses(k, far.to)
    ]
    playback = Playback(schedule, action_seconds(schedule, cells, placement), routes, flow, owners=owners)
    if playback.stuck:
        waiting = ", ".join(f"stage {k} at {action}" for k, action in playback.stuck.items())
        raise SettingError(f"the schedule deadlocks: {waiting} wait for each other")
    rows = playback.rows
    end = max((row[-1].end for row in rows if row), default=0.0)
    for k, row in enumerate(rows):
        update = sum(cell.update_s for cell in placement.on_stage(k, cells))
        if update:
            row.append(Span("U", -1, end, end + update))
    return Timeline(tuple(tuple(row) for row in rows))


_COST_NUMBERS = (
    "forward_s",
    "recompute_s",
    "backward_s",
    "update_s",
    "weight_grad_s",
    "split_s",
    "activation_bytes",
    "gradient_bytes",
)


def _check(schedule: Sequence[Sequence[Action]], cells: Sequence[CellCost], link: Link | Links) -> None:
    faults, virtual_stages = [], virtual_stages_of(schedule)
    if len(schedule) * virtual_stages != len(cells):
        each = f" of {virtual_stages} cells" if virtual_stages > 1 else ""
        faults.append(f"there are costs of {len(cells)} cells, the schedule has {len(schedule)} stages{each}")
    for at, cell in enumerate(cells):
        name_of = f"stage {at % len(schedule)}" if virtual_stages == 1 else f"cell {at}"
        for name in _COST_NUMBERS:
            value = getattr(cell, name)
            if not (math.isfinite(value) and value >= 0):
                faults.append(f"{name_of} has {name} = {value}")
        if cell.weight_grad_s > cell.backward_s:
            faults.append(f"{name_of} defers {cell.weight_grad_s} s of a backward of {cell.backward_s} s")
    for each_link in (link.within_node, link.between_nodes) if isinstance(link, Links) else (link,):
        if not (math.isfinite(each_link.latency_s) and each_link.latency_s >= 0 and each_link.bytes_per_s > 0):
            faults.append(f"the link has a latency of {each_link.latency_s} s and {each_link.bytes_per_s} bytes/s")
    if faults:
        raise SettingError(f"a step cannot be simulated: {'; '.join(faults)}; costs must be finite and not negative")
