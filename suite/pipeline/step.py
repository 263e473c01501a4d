"""The one executor: walks a stage's list of actions, whatever schedule made it.

F3   take activations 3 -> run the cell -> send them on          (the last cell: loss)
R3   run the cell again on what was kept, this time with a graph
B3   take gradients 3 -> backward -> send the inputs' gradients back
W3   add the weights' gradients that B3 put off
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from suite.errors import StallError
from suite.pipeline.action import Action, closing_in, put_off_in, rebuilt_in
from suite.pipeline.boundary import Announcement, Front, TensorSpec, announced
from suite.pipeline.doing import Doing
from suite.pipeline.layers import Tensors
from suite.pipeline.microbatch import MiniBatch
from suite.pipeline.put_off import Later
from suite.pipeline.recipe import Recipe
from suite.pipeline.recorder import Mark, Recorder
from suite.pipeline.reduction import Reduction
from suite.pipeline.skip import Cargo, Routes
from suite.pipeline.stage import Kept, Stage
from suite.pipeline.topology import Place
from suite.pipeline.transport import Inboxes, Transport


@dataclass(frozen=True)
class Sums:
    """What the last stage saw of its replica's share of a mini-batch, summed over tokens. Zero on other stages."""

    objective: float = 0.0
    measure: float = 0.0


@dataclass(frozen=True)
class Way:
    """How a cell is bound to the others: the routes of its skips, and its lanes; these are None where K = 1."""

    routes: Routes
    transport: Transport | None


@dataclass
class Passage:
    """One mini-batch on its way through one cell."""

    arriving: Sequence[Cargo]
    leaving: Sequence[Cargo]
    """Empty behind the last cell."""
    activations: Inboxes | None = None
    gradients: Inboxes | None = None
    kept: dict[int, Kept] = field(default_factory=dict)
    later: dict[int, Later] = field(default_factory=dict)


@dataclass
class Flight:
    """One mini-batch on its way through one stage; ``passages`` are those of its cells, opened one by one."""

    step: int
    offset: int
    train: bool
    actions: list[Action]
    rebuilt: set[tuple[int, int]]
    put_off: set[tuple[int, int]]
    closing: set[Action]
    passages: list[Passage]
    inputs: Sequence[Tensors] | None = None
    targets: Sequence[Tensors] | None = None
    scale: float = 0.0
    results: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)


class Executor:
    """Runs mini-batches through one stage. After ``train`` the parameters' ``.grad`` hold this replica's gradients:
    of the summed objective, times R, divided by the mini-batch's weight, so that their mean over replicas is the
    gradient of the mini-batch's mean."""

    def __init__(
        self, place: Place, stage: Stage, ways: Sequence[Way], recipe: Recipe, doing: Doing | None = None
    ) -> None:
        """``ways`` are those of the stage's cells; ``doing`` is told every action."""
        assert len(ways) == len(stage.cells) == recipe.turns, (len(ways), len(stage.cells), recipe)
        assert all((way.transport is None) == (place.stages == 1) for way in ways)
        self.place, self.stage, self.ways, self.recipe = place, stage, ways, recipe
        self.doing = doing or Doing()
        self.doing.stage = stage
        self.recorder: Recorder | None = None
        """Set for the steps of which a trace is wanted."""
        self.reduction: Reduction | None = None
        """Set where there are replicas: told of gradients as soon as nothing is added to them any more. Whoever sets it
        finishes it after each ``train``."""

    def train(self, batch: MiniBatch | None, step: int) -> Sums:
        """Forward, rebuild and backward of one mini-batch. Stages between the first and the last need no ``batch``.

        Raises StallError, naming this stage and its action, when a neighbour does not deliver in time.
        """
        assert self.reduction is None or self.reduction.idle, "gradients of the step before were not finished"
        self.stage.train(True)
        return self._run(batch, step, train=True)

    def foresee(self, batch: MiniBatch) -> None:
        """Finds out the shapes of a mini-batch to come, where this stage is the one that begins with them: new ones
        take a while, which another thread may spend."""
        if self.place.first and not self._ends(0):
            for tensors in batch.inputs:
                self.stage.leaving(Front(tuple(map(TensorSpec.of, tensors))))

    def evaluate(self, batch: MiniBatch | None, step: int = 0) -> Sums:
        """The same walk forward only, dropout off."""
        self.stage.train(False)
        return self._run(batch, step, train=False)

    def _run(self, batch: MiniBatch | None, step: int, train: bool) -> Sums:
        for way in self.ways:
            if way.transport is not None:
                way.transport.recorder = self.recorder
        told = step if train else None
        self.doing.turn("open", told)
        try:
            flight = self._begin(batch, step, train)
            for action in flight.actions:
                self.doing.turn(action, told)
                if action.turn == len(flight.passages):
                    self._open(flight)
                _DO[action.kind](self, flight, action)
                if self.reduction is not None and action in flight.closing:
                    self.reduction.whole(self.stage.parameters(action.turn))
            self.doing.turn("close", told)
            while len(flight.passages) < len(self.ways):  # a replica without micro-batches has no action to open them
                self._open(flight)
            for way in self.ways:
                if way.transport is not None:
                    way.transport.flush()
        except StallError as error:
            doing = self.doing.what
            at = f"at {doing}" if isinstance(doing, Action) else "at its first or last messages"
            when = f"step {step}" if train else "evaluation"
            raise type(error)(f"{self.place}, {when}, {at}: {error}") from error
        sums = [torch.stack(pair).double() for _, pair in sorted(flight.results.items())]
        objective, measure = torch.stack(sums).sum(0).tolist() if sums else (0.0, 0.0)
        return Sums(objective, measure)

    def _begin(self, batch: MiniBatch | None, step: int, train: bool) -> Flight:
        """Learns what arrives, tells the next stage what will leave, and posts the first receives."""
        place = self.place
        assert batch is not None or not (place.first or place.last), "the first and last stage need the mini-batch"
        heard = self._heard(0, batch)
        actions = self.recipe.actions(place.stages, len(heard.fronts), train)[place.stage]
        flight = Flight(
            step, heard.offset, train, actions, rebuilt_in(actions), put_off_in(actions), closing_in(actions), []
        )  # fmt: skip
        self._open(flight, heard)
        if batch is not None:
            assert len(batch) == len(heard.fronts), f"{len(batch)} micro-batches, {len(heard.fronts)} were announced"
            flight.inputs = batch.inputs if place.first else None
            flight.targets = batch.targets if place.last else None
            flight.scale = place.replicas / batch.weight
        return flight

    def _heard(self, turn: int, batch: MiniBatch | None) -> Announcement:
        """Returns what will enter a cell."""
        way = self.ways[turn]
        if self.place.first and turn == 0:
            assert batch is not None
            fronts = tuple(Front(tuple(map(TensorSpec.of, tensors))) for tensors in batch.inputs)
            return Announcement(fronts, batch.offset)
        assert way.transport is not None
        with self.recorder.waiting() if self.recorder is not None else nullcontext():
            return way.transport.heed(way.routes.names)

    def _open(self, flight: Flight, heard: Announcement | None = None) -> None:
        """Makes ready the next cell: hears what will enter it, says what will leave it, posts the first receives."""
        turn = len(flight.passages)
        way, heard = self.ways[turn], heard or self._heard(turn, None)
        transport, routes = way.transport, way.routes
        ends = self._ends(turn)
        ahead = [] if ends else [self.stage.leaving(front, turn) for front in heard.fronts]
        arriving = [routes.arriving(front) for front in heard.fronts]
        leaving = [routes.leaving(front) for front in ahead]
        passage = Passage(arriving, leaving)
        flight.passages.append(passage)
        if transport is None:
            return
        if not ends:
            said = Announcement(tuple(map(routes.ahead, ahead)), heard.offset)
            transport.announce(said, routes.names)
            if flight.train:
                order = [a.micro_batch for a in flight.actions if a.kind == "B" and a.turn == turn]
                passage.gradients = transport.gradients([(i, leaving[i]) for i in order], flight.step)
        if not (self.place.first and turn == 0):
            order = [a.micro_batch for a in flight.actions if a.kind == "F" and a.turn == turn]
            passage.activations = transport.activations([(i, arriving[i]) for i in order], flight.step)

    def _ends(self, turn: int) -> bool:
        """Whether the loss stands behind this cell."""
        return self.place.last and turn == len(self.ways) - 1

    def _here(self, tensors: Tensors) -> Tensors:
        """Returns one micro-batch's tensors on the device, where they stand no longer than it needs them."""
        return tuple(tensor.to(self.stage.device, non_blocking=True) for tensor in tensors)

    def _forward(self, flight: Flight, action: Action) -> None:
        i, passage = action.micro_batch, flight.passages[action.turn]
        if passage.activations is not None:
            inputs = self._taken(passage.activations, i)
        else:
            assert flight.inputs is not None
            inputs = self._here(flight.inputs[i])
        start = self._mark()
        kept = Kept(inputs)
        if flight.train:
            passage.kept[i] = kept
        if flight.train and (action.turn, i) not in flight.rebuilt:
            outputs, measure = self._graph(flight, action)
        else:
            with torch.no_grad():
                outputs, measure = self.stage.forward(
                    inputs, passage.arriving[i], *self._target(flight, action), flight.step, flight.offset + i,
                    action.turn,
                )  # fmt: skip
        self._note(action, start)
        if measure is not None:
            if self.doing.faults is not None:
                outputs = (self.doing.faults.spoil_loss(outputs[0]),)
            flight.results[i] = (outputs[0].detach(), measure)
        else:
            transport, cargo = self.ways[action.turn].transport, passage.leaving[i]
            assert transport is not None
            transport.send_activations(announced(outputs, cargo.boundary), cargo, i, flight.step)

    def _rebuild(self, flight: Flight, action: Action) -> None:
        start = self._mark()
        self._graph(flight, action)
        self._note(action, start)

    def _graph(self, flight: Flight, action: Action) -> tuple[Tensors, Tensor | None]:
        i, passage = action.micro_batch, flight.passages[action.turn]
        return self.stage.graph(
            passage.kept[i], passage.arriving[i], *self._target(flight, action), flight.step, flight.offset + i,
            action.turn,
        )  # fmt: skip

    def _backward(self, flight: Flight, action: Action) -> None:
        i, passage = action.micro_batch, flight.passages[action.turn]
        kept = passage.kept.pop(i)
        if passage.gradients is not None:
            gradients = self._taken(passage.gradients, i)
        else:
            objective = flight.results[i][0]
            gradients = (torch.full_like(objective, flight.scale),)
        start = self._mark()
        if (action.turn, i) in flight.put_off:
            returned, passage.later[i] = self.stage.input_backward(kept, gradients, passage.arriving[i], action.turn)
        else:
            with self._followed(flight, action):
                returned = self.stage.backward(kept, gradients, passage.arriving[i])
        self._note(action, start)
        transport = self.ways[action.turn].transport
        if transport is not None and not (self.place.first and action.turn == 0):
            transport.send_gradients(returned, passage.arriving[i], i, flight.step)

    def _followed(self, flight: Flight, action: Action) -> AbstractContextManager[None]:
        """A context in which gradients leave for the other replicas as they are made, where none are added later."""
        if self.reduction is None or action not in flight.closing:
            return nullcontext()
        return self.reduction.following(self.stage.parameters(action.turn))

    def _weigh(self, flight: Flight, action: Action) -> None:
        start = self._mark()
        later = flight.passages[action.turn].later.pop(action.micro_batch)
        for parameter in self.stage.weigh(later, action.turn):
            if self.reduction is not None and action in flight.closing:
                self.reduction.whole([parameter])
        self._note(action, start)

    def _taken(self, inbox: Inboxes, micro_batch: int) -> Tensors:
        if self.recorder is None:
            return inbox.take(micro_batch)
        with self.recorder.waiting():
            return inbox.take(micro_batch)

    def _mark(self) -> Mark:
        return self.recorder.mark() if self.recorder is not None else None

    def _note(self, action: Action, start: Mark) -> None:
        if self.recorder is not None:
            self.recorder.note(action.kind, action.micro_batch, start, action.turn)

    def _target(self, flight: Flight, action: Action) -> tuple[Cargo | None, Tensors]:
        """Returns what leaves a cell, or from the last one what its loss is held against."""
        i = action.micro_batch
        if not self._ends(action.turn):
            return flight.passages[action.turn].leaving[i], ()
        assert flight.targets is not None
        return None, self._here(flight.targets[i])


_DO = {"F": Executor._forward, "R": Executor._rebuild, "B": Executor._backward, "W": Executor._weigh}
