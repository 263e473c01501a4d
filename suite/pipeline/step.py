"""The one executor: walks a stage's list of actions, whatever schedule made it.

F3   take activations 3 -> run the cell -> send them on          (the last stage: loss)
R3   run the cell again on what was kept, this time with a graph
B3   take gradients 3 -> backward -> send the inputs' gradients back
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from suite.errors import StallError
from suite.pipeline.boundary import Announcement, Front, TensorSpec, announced
from suite.pipeline.layers import Tensors
from suite.pipeline.microbatch import MiniBatch
from suite.pipeline.recorder import Mark, Recorder
from suite.pipeline.schedule import Action, fill_drain, forward_only, validate
from suite.pipeline.skip import Cargo, Routes
from suite.pipeline.stage import Kept, Stage
from suite.pipeline.topology import Place
from suite.pipeline.transport import Inboxes, Transport
from suite.settings import Remat


@dataclass(frozen=True)
class Sums:
    """What the last stage saw of its replica's share of a mini-batch, summed over tokens. Zero on other stages."""

    objective: float = 0.0
    measure: float = 0.0


@dataclass
class Flight:
    """One mini-batch on its way through one stage."""

    step: int
    offset: int
    train: bool
    actions: list[Action]
    rebuilt: frozenset[int]
    arriving: Sequence[Cargo]
    leaving: Sequence[Cargo]
    inputs: Sequence[Tensors] | None = None
    targets: Sequence[Tensors] | None = None
    scale: float = 0.0
    activations: Inboxes | None = None
    gradients: Inboxes | None = None
    kept: dict[int, Kept] = field(default_factory=dict)
    results: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)


class Executor:
    """Runs mini-batches through one stage. After ``train`` the parameters' ``.grad`` hold this replica's gradients:
    of the summed objective, times R, divided by the mini-batch's weight, so that their mean over replicas is the
    gradient of the mini-batch's mean."""

    def __init__(
        self, place: Place, stage: Stage, routes: Routes, transport: Transport | None, remat: Remat
    ) -> None:  # fmt: skip
        """``transport`` is None for a pipeline of one stage."""
        assert (transport is None) == (place.stages == 1)
        self.place, self.stage, self.routes, self.transport, self.remat = place, stage, routes, transport, remat
        self.doing: Action | None = None
        self.recorder: Recorder | None = None
        """Set for the steps of which a trace is wanted."""
        self._valid: dict[tuple[int, bool, Remat], list[Action]] = {}

    def train(self, batch: MiniBatch | None, step: int) -> Sums:
        """Forward, rebuild and backward of one mini-batch. Stages between the first and the last need no ``batch``.

        Raises StallError, naming this stage and its action, when a neighbour does not deliver in time.
        """
        self.stage.train(True)
        return self._run(batch, step, train=True)

    def evaluate(self, batch: MiniBatch | None, step: int = 0) -> Sums:
        """The same walk forward only, dropout off."""
        self.stage.train(False)
        return self._run(batch, step, train=False)

    def _run(self, batch: MiniBatch | None, step: int, train: bool) -> Sums:
        try:
            flight = self._begin(batch, step, train)
            for action in flight.actions:
                self.doing = action
                if action.kind == "F":
                    self._forward(flight, action.micro_batch)
                elif action.kind == "R":
                    self._rebuild(flight, action)
                else:
                    self._backward(flight, action.micro_batch)
            self.doing = None
            if self.transport is not None:
                self.transport.flush()
        except StallError as error:
            at = f"at {self.doing}" if self.doing else "at its first or last messages"
            when = f"step {step}" if train else "evaluation"
            raise type(error)(f"{self.place}, {when}, {at}: {error}") from error
        sums = [torch.stack(pair).double() for _, pair in sorted(flight.results.items())]
        objective, measure = torch.stack(sums).sum(0).tolist() if sums else (0.0, 0.0)
        return Sums(objective, measure)

    def _begin(self, batch: MiniBatch | None, step: int, train: bool) -> Flight:
        """Learns what arrives, tells the next stage what will leave, and posts the first receives."""
        place, transport, routes = self.place, self.transport, self.routes
        assert batch is not None or not (place.first or place.last), "the first and last stage need the mini-batch"
        if place.first:
            assert batch is not None
            fronts = tuple(Front(tuple(map(TensorSpec.of, tensors))) for tensors in batch.inputs)
            heard = Announcement(fronts, batch.offset)
        else:
            assert transport is not None
            heard = transport.heed(routes.names)
        ahead = [] if place.last else [self.stage.leaving(front) for front in heard.fronts]
        arriving = [routes.arriving(front) for front in heard.fronts]
        leaving = [routes.leaving(front) for front in ahead]
        actions = self._actions(len(arriving), train)
        rebuilt = frozenset(action.micro_batch for action in actions if action.kind == "R")
        flight = Flight(step, heard.offset, train, actions, rebuilt, arriving, leaving)
        if transport is not None and not place.last:
            said = Announcement(tuple(map(routes.ahead, ahead)), heard.offset)
            transport.announce(said, routes.names)
            if train:
                order = [a.micro_batch for a in flight.actions if a.kind == "B"]
                flight.gradients = transport.gradients([(i, leaving[i]) for i in order], step)
        if transport is not None and not place.first:
            order = [a.micro_batch for a in flight.actions if a.kind == "F"]
            flight.activations = transport.activations([(i, arriving[i]) for i in order], step)
        if batch is not None:
            assert len(batch) == len(arriving), f"{len(batch)} micro-batches here, {len(arriving)} were announced"
            device = self.stage.device
            flight.inputs = (
                [tuple(t.to(device, non_blocking=True) for t in tensors) for tensors in batch.inputs]
                if place.first
                else None
            )
            flight.targets = (
                [tuple(t.to(device, non_blocking=True) for t in tensors) for tensors in batch.targets]
                if place.last
                else None
            )
            flight.scale = place.replicas / batch.weight
        return flight

    def _actions(self, micro_batches: int, train: bool) -> list[Action]:
        """Returns this stage's actions, from a schedule validated before its first use."""
        key = (micro_batches, train, self.remat)
        if key not in self._valid:
            stages = self.place.stages
            schedule = fill_drain(stages, micro_batches, self.remat) if train else forward_only(stages, micro_batches)
            validate(schedule, micro_batches, train)
            self._valid[key] = schedule[self.place.stage]
        return self._valid[key]

    def _forward(self, flight: Flight, i: int) -> None:
        if flight.activations is not None:
            inputs = flight.activations.take(i)
        else:
            assert flight.inputs is not None
            inputs = flight.inputs[i]
        start = self._mark()
        kept = Kept(inputs)
        if flight.train:
            flight.kept[i] = kept
        if flight.train and i not in flight.rebuilt:
            outputs, measure = self._graph(flight, i)
        else:
            leaving, targets = self._leaving(flight, i), self._targets(flight, i)
            with torch.no_grad():
                outputs, measure = self.stage.forward(
                    inputs, flight.arriving[i], leaving, targets, flight.step, flight.offset + i
                )
        self._note(Action("F", i), start)
        if measure is not None:
            flight.results[i] = (outputs[0].detach(), measure)
        elif self.transport is not None:
            cargo = flight.leaving[i]
            self.transport.send_activations(announced(outputs, cargo.boundary), cargo, i, flight.step)

    def _rebuild(self, flight: Flight, action: Action) -> None:
        start = self._mark()
        self._graph(flight, action.micro_batch)
        self._note(action, start)

    def _graph(self, flight: Flight, i: int) -> tuple[Tensors, Tensor | None]:
        leaving, targets = self._leaving(flight, i), self._targets(flight, i)
        return self.stage.graph(flight.kept[i], flight.arriving[i], leaving, targets, flight.step, flight.offset + i)

    def _backward(self, flight: Flight, i: int) -> None:
        kept = flight.kept.pop(i)
        if flight.gradients is not None:
            gradients = flight.gradients.take(i)
        else:
            assert kept.outputs is not None
            gradients = (torch.full_like(kept.outputs[0], flight.scale),)
        start = self._mark()
        returned = self.stage.backward(kept, gradients, flight.arriving[i])
        self._note(Action("B", i), start)
        if self.transport is not None and not self.place.first:
            self.transport.send_gradients(returned, flight.arriving[i], i, flight.step)

    def _mark(self) -> Mark:
        return self.recorder.mark() if self.recorder is not None else None

    def _note(self, action: Action, start: Mark) -> None:
        if self.recorder is not None:
            self.recorder.note(action.kind, action.micro_batch, start)

    def _leaving(self, flight: Flight, i: int) -> Cargo | None:
        return None if self.place.last else flight.leaving[i]

    def _targets(self, flight: Flight, i: int) -> Tensors:
        return flight.targets[i] if flight.targets is not None else ()
