"""Simulates a schedule with given costs and links: when each stage does what, and how long a step takes.

``suite.pipeline.schedule.play`` plays it. The update at its end waits for all stages, whose gradient norm it needs. Not
simulated are a step's metadata (three latencies a stage, mostly hidden).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from suite.errors import SettingError
from suite.pipeline.model.cells import CellPlacement
from suite.pipeline.planning.costs import LayerCost, MessageCost, message_costs
from suite.pipeline.schedule.action import Action
from suite.pipeline.schedule.flow_control import GLOO, FlowControl
from suite.pipeline.schedule.play import DIRECTIONS, Route, Seconds, play
from suite.pipeline.schedule.timeline import Span, Timeline


@dataclass(frozen=True, slots=True)
class Link:
    """The cost of a message between neighbouring stages. For its overhead the sender is busy, and the receiver as long
    (the o of LogP, Culler et al. 1993)."""

    latency_s: float = 0.0
    bytes_per_s: float = float("inf")
    overhead_s: float = 0.0
    overhead_s_per_byte: float = 0.0

    def seconds(self, size: int) -> float:
        """Returns how long a message of ``size`` bytes takes once it has been sent."""
        return self.latency_s + size / self.bytes_per_s

    def busy_s(self, size: int) -> float:
        """Returns how long a message of ``size`` bytes keeps each of its two stages busy."""
        return self.overhead_s + size * self.overhead_s_per_byte if size else 0.0

    @property
    def slowest(self) -> Link:
        """Itself; of ``Links`` the kind with the longest latency."""
        return self

    def between(self, source: int, target: int) -> Link:
        """Returns the link between two stages, as ``Links`` does: this one."""
        return self


@dataclass(frozen=True, slots=True)
class Links:
    """The links of a pipeline on several nodes."""

    within_node: Link
    between_nodes: Link
    cuts: frozenset[int]
    """The cuts k, from stage k to k + 1, between nodes (``suite.pipeline.planning.placement``)."""

    @property
    def slowest(self) -> Link:
        return max(self.within_node, self.between_nodes, key=lambda link: link.latency_s)

    def between(self, source: int, target: int) -> Link:
        passed = range(min(source, target), max(source, target))
        return self.between_nodes if self.cuts.intersection(passed) else self.within_node


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
    forward_messages_s: float = 0.0
    """For so long the messages of its forward, received and sent, keep the stage busy."""
    backward_messages_s: float = 0.0

    def seconds(self, kind: str, recomputed: bool) -> float:
        """Returns how long an action takes, with its messages; a forward whose micro-batch is not recomputed records
        its graph. Raises KeyError for an unknown kind."""
        if kind == "F":
            return (self.forward_s if recomputed else self.recompute_s) + self.forward_messages_s
        if kind == "I":
            return self.backward_s + (self.split_s - self.weight_grad_s) + self.backward_messages_s
        if kind == "B":
            return self.backward_s + self.backward_messages_s
        return {"R": self.recompute_s, "W": self.weight_grad_s}[kind]

    @property
    def least_seconds(self) -> tuple[float, float, float, float]:
        """The least seconds of a forward, what its graph adds, a backward, and what its weight gradients add."""
        forward, whole = min(self.seconds("F", True), self.seconds("F", False)), self.seconds("B", False)
        backward = min(whole, self.seconds("I", False))
        return forward, self.seconds("F", False) - forward, backward, whole - backward


def simulate(
    schedule: Sequence[Sequence[Action]],
    cells: Sequence[CellCost],
    link: Link | Links = Link(),
    flow: FlowControl = GLOO,
    cell_to_stage: tuple[int, ...] = (),
    norm_all_reduce_s: float = 0.0,
) -> Timeline:
    """Returns the timeline of one step; ``cells`` are the costs of the cells, ``flow`` says when receives are posted,
    and ``cell_to_stage`` as in ``CellPlacement``. The update begins when all stages are done, because
    it needs the global gradient norm; its all-reduce takes ``norm_all_reduce_s``.

    Raises SettingError when the schedule deadlocks; ``validate`` finds every other error of a schedule, ``check_costs``
    those of layer costs.
    """
    placement = CellPlacement(len(schedule), cell_to_stage)
    played = play(schedule, seconds_of(cells), routes_of(cells, link, placement), flow, cell_to_stage)
    if played.stuck:
        waiting = ", ".join(f"stage {k} at {action}" for k, action in played.stuck.items())
        raise SettingError(f"the schedule deadlocks: {waiting} wait for each other")
    rows = played.rows
    end = max((row[-1].end for row in rows if row), default=0.0) + norm_all_reduce_s
    for k, row in enumerate(rows):
        update = sum(cell.update_s for cell in placement.on_stage(k, cells))
        if update:
            row.append(Span("U", -1, end, end + update))
    return Timeline(tuple(tuple(row) for row in rows))


def seconds_of(cells: Sequence[CellCost]) -> Seconds:
    """Returns the seconds of the cells' actions."""
    return {kind: [cell.seconds(kind.upper(), kind == "f") for cell in cells] for kind in DIRECTIONS}


def routes_of(cells: Sequence[CellCost], link: Link | Links, placement: CellPlacement) -> list[Route]:
    """Returns the routes of the messages between cells; of those of one stage only neighbours."""

    def route(source: int, target: int, activation_bytes: int, gradient_bytes: int) -> Route:
        between = link.between(placement.stage_of(source), placement.stage_of(target))
        rate = between.bytes_per_s
        return Route(source, target, activation_bytes / rate, gradient_bytes / rate, between.latency_s)

    routes = [route(k, k + 1, cells[k].activation_bytes, cells[k + 1].gradient_bytes) for k in range(len(cells) - 1)]
    return routes + [
        route(k, far.to, far.activation_bytes, far.gradient_bytes)
        for k, cell in enumerate(cells)
        for far in cell.far_messages
        if placement.crosses(k, far.to)
    ]


def cell_costs(
    costs: Sequence[LayerCost],
    cells: Sequence[range],
    placement: CellPlacement,
    link: Link | Links,
    reduce_s_per_byte: float = 0.0,
) -> list[CellCost]:
    """Returns the costs of cells of these layers. Replicas reduce a byte of gradients in ``reduce_s_per_byte``."""
    sent = [message_costs(costs, cells, k) for k in range(len(cells))]
    forward_s, backward_s = [0.0] * len(cells), [0.0] * len(cells)
    for source, messages in enumerate(sent):
        for message in messages:
            if placement.crosses(source, message.to):
                between = link.between(placement.stage_of(source), placement.stage_of(message.to))
                for end in (source, message.to):
                    forward_s[end] += between.busy_s(message.activation_bytes)
                    backward_s[end] += between.busy_s(message.gradient_bytes)
    found = []
    for k, cell in enumerate(cells):
        inside = [costs[index] for index in cell]
        gradient_bytes = 4 * sum(cost.parameters - cost.frozen for cost in inside)
        found.append(
            CellCost(
                forward_s=sum(cost.forward_s for cost in inside),
                recompute_s=sum(cost.recompute_s for cost in inside),
                backward_s=sum(cost.backward_s for cost in inside),
                weight_grad_s=sum(cost.weight_grad_s for cost in inside),
                split_s=sum(cost.split_s for cost in inside),
                update_s=sum(cost.update_s for cost in inside) + reduce_s_per_byte * gradient_bytes,
                activation_bytes=sent[k][0].activation_bytes if sent[k] else 0,
                gradient_bytes=sent[k - 1][0].gradient_bytes if k else 0,
                far_messages=tuple(sent[k][1:]),
                forward_messages_s=forward_s[k],
                backward_messages_s=backward_s[k],
            )
        )
    return found
