"""The executor: runs a stage's list of actions, whatever schedule made it.

F3   receive activations 3 -> run the cell -> send its outputs         (last cell: compute the loss)
R3   run the cell again on the saved inputs, this time with a graph
B3   receive gradients 3 -> backward -> send the inputs' gradients
I3   the same, but weight gradients are deferred
W3   add the weight gradients that I3 deferred
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from suite.errors import StallError
from suite.pipeline.model.layers import Tensors
from suite.pipeline.model.microbatch import MiniBatch
from suite.pipeline.model.topology import RankCoord
from suite.pipeline.runtime.boundary import BoundaryMetadata, CutSpec, cast_to_boundary
from suite.pipeline.runtime.gradient_reducer import GradientReducer
from suite.pipeline.runtime.p2p import P2PCommunicator, RecvQueues
from suite.pipeline.runtime.recorder import Mark, Recorder
from suite.pipeline.runtime.skip import CellBoundary, SkipLayout
from suite.pipeline.runtime.stage import CellMicroBatch, Stage
from suite.pipeline.runtime.weight_grad import DeferredGrads
from suite.pipeline.runtime.worker_status import WorkerStatus
from suite.pipeline.schedule.action import Action, last_grad_actions, recomputed_in
from suite.pipeline.schedule.config import ScheduleConfig


@dataclass(frozen=True)
class LossSums:
    """Loss sums over the tokens of a replica's share of a mini-batch, or of one micro-batch. Only the last stage has
    them; zero elsewhere."""

    objective: float = 0.0
    metric: float = 0.0


@dataclass(frozen=True)
class CellLinks:
    """How a cell communicates with the others: where its skips go, and its messages (None where K = 1)."""

    skips: SkipLayout
    p2p: P2PCommunicator | None


@dataclass
class CellState:
    """One mini-batch in one cell."""

    input_boundaries: Sequence[CellBoundary]
    output_boundaries: Sequence[CellBoundary | None]
    """By micro-batch; None in the last cell."""
    activations: RecvQueues | None = None
    gradients: RecvQueues | None = None
    micro_batches: dict[int, CellMicroBatch] = field(default_factory=dict)
    """Those between forward and backward."""
    deferred: dict[int, DeferredGrads] = field(default_factory=dict)


@dataclass
class StepState:
    """One mini-batch on one stage; ``cells`` grows as its cells start, one by one."""

    step: int
    offset: int
    train: bool
    actions: list[Action]
    recomputed: set[tuple[int, int]]
    last_grad_actions: set[Action]
    cells: list[CellState] = field(default_factory=list)
    inputs: Sequence[Tensors] | None = None
    targets: Sequence[Tensors] | None = None
    scale: float = 0.0
    results: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    draining: bool = False
    """Whether a backward has begun."""


class Executor:
    """Runs mini-batches through one stage.

    After ``train`` the parameters' ``.grad`` hold this replica's gradients: of the summed objective, times R, divided
    by the mini-batch's weight. So their mean over replicas is the gradient of the mini-batch's mean.
    """

    def __init__(
        self,
        coord: RankCoord,
        stage: Stage,
        links: Sequence[CellLinks],
        schedule_config: ScheduleConfig,
        status: WorkerStatus | None = None,
    ) -> None:
        """``links`` has one entry a cell of the stage; every action is reported to ``status``."""
        assert len(links) == len(stage.cells) == schedule_config.virtual_stages, (
            len(links),
            len(stage.cells),
            schedule_config,
        )
        assert all((cell_links.p2p is None) == (coord.stages == 1) for cell_links in links)
        self.coord, self.stage, self.links, self.schedule_config = coord, stage, links, schedule_config
        self.status = status or WorkerStatus()
        self.status.stage = stage
        self.recorder: Recorder | None = None
        """Set for steps that are traced."""
        self.profiling = False
        """Whether torch.profiler records; each action is then a span."""
        self.reducer: GradientReducer | None = None
        """Set where there are replicas; gradients are passed to it as soon as they are complete. The caller runs its
        ``finish`` after each ``train``."""
        self.on_drain: Callable[[], None] | None = None
        """Called in each training step before the stage's first backward, when stage 0 waits for the others."""

    def train(self, batch: MiniBatch | None, step: int) -> LossSums:
        """Runs the forwards, recomputes and backwards of one mini-batch. Only the first and last stage need ``batch``.

        Raises StallError, naming this stage and its action, when a message does not arrive in time.
        """
        assert self.reducer is None or self.reducer.idle, "gradients of the step before were not finished"
        self.stage.train(True)
        sums = self._run(batch, step, train=True)
        objective, metric = sums.sum(0).tolist()
        return LossSums(objective, metric)

    def prefetch_shapes(self, batch: MiniBatch) -> None:
        """Infers the shapes of a future mini-batch on the first stage. New shapes take a while, so another thread may
        call this ahead of time."""
        if self.coord.is_first and not self._is_last_cell(0):
            for tensors in batch.inputs:
                self.stage.infer_output(CutSpec.of(tensors))

    def evaluate(self, batch: MiniBatch | None, step: int = 0) -> list[LossSums]:
        """Runs the forwards only, with dropout off. Returns the sums of each micro-batch, none before the last stage.

        Leaves no trace in the stage: the next ``train`` gives the same bits as without it.
        """
        self.stage.train(False)
        return [LossSums(*sums) for sums in self._run(batch, step, train=False).tolist()]

    def _run(self, batch: MiniBatch | None, step: int, train: bool) -> Tensor:
        """Returns objective and metric of each micro-batch, (M, 2) in fp64; (0, 2) before the last stage."""
        status_step = step if train else None
        self.status.begin("open", status_step)
        try:
            state = self._begin(batch, step, train)
            with self.stage.weights_cast_once():
                for action in state.actions:
                    self.status.begin(action, status_step)
                    if action.virtual_stage == len(state.cells):
                        self._start_cell(state)
                    with torch.profiler.record_function(str(action)) if self.profiling else nullcontext():
                        _HANDLERS[action.kind](self, state, action)
                    if self.reducer is not None and action in state.last_grad_actions:
                        self.reducer.mark_ready(self.stage.parameters(action.virtual_stage))
            self.status.begin("close", status_step)
            while len(state.cells) < len(self.links):  # a replica without micro-batches has no action that starts them
                self._start_cell(state)
            for cell_links in self.links:
                if cell_links.p2p is not None:
                    cell_links.p2p.flush()
        except StallError as error:
            action_or_phase = self.status.action
            at = f"at {action_or_phase}" if isinstance(action_or_phase, Action) else "at its first or last messages"
            when = f"step {step}" if train else "evaluation"
            raise type(error)(f"{self.coord}, {when}, {at}: {error}") from error
        sums = [torch.stack(pair).double() for _, pair in sorted(state.results.items())]
        return torch.stack(sums) if sums else torch.zeros(0, 2, dtype=torch.float64)

    def _begin(self, batch: MiniBatch | None, step: int, train: bool) -> StepState:
        """Receives the boundary metadata, sends that of the next cell, and posts the first receives."""
        coord = self.coord
        assert batch is not None or not (coord.is_first or coord.is_last), (
            "the first and last stage need the mini-batch"
        )
        metadata = self._recv_metadata(0, batch)
        actions = self.schedule_config.actions(coord.stages, len(metadata.cuts), train)[coord.stage]
        state = StepState(step, metadata.offset, train, actions, recomputed_in(actions), last_grad_actions(actions))
        self._start_cell(state, metadata)
        if batch is not None:
            assert len(batch) == len(metadata.cuts), (
                f"{len(batch)} micro-batches, the metadata has {len(metadata.cuts)}"
            )
            state.inputs = batch.inputs if coord.is_first else None
            state.targets = batch.targets if coord.is_last else None
            state.scale = coord.replicas / batch.weight
        return state

    def _recv_metadata(self, virtual_stage: int, batch: MiniBatch | None) -> BoundaryMetadata:
        """Returns the metadata of a cell's input boundary."""
        cell_links = self.links[virtual_stage]
        if self._is_first_cell(virtual_stage):
            assert batch is not None
            return BoundaryMetadata(tuple(map(CutSpec.of, batch.inputs)), batch.offset)
        assert cell_links.p2p is not None
        return cell_links.p2p.recv_metadata(cell_links.skips.names)

    def _start_cell(self, state: StepState, metadata: BoundaryMetadata | None = None) -> None:
        """Starts the next cell: receives its metadata, sends that of the cell behind it, posts the first receives."""
        virtual_stage = len(state.cells)
        cell_links, metadata = self.links[virtual_stage], metadata or self._recv_metadata(virtual_stage, None)
        p2p, skip_layout = cell_links.p2p, cell_links.skips
        is_last = self._is_last_cell(virtual_stage)
        inputs = [skip_layout.input_boundary(cut) for cut in metadata.cuts]
        output_cuts = [] if is_last else [self.stage.infer_output(cut, virtual_stage) for cut in metadata.cuts]
        outputs = [skip_layout.output_boundary(cut) for cut in output_cuts]
        cell = CellState(inputs, outputs or [None] * len(inputs))
        state.cells.append(cell)
        if p2p is None:
            return
        if not is_last:
            next_metadata = BoundaryMetadata(tuple(map(skip_layout.next_cut, output_cuts)), metadata.offset)
            p2p.send_metadata(next_metadata, skip_layout.names)
            if state.train:
                order = [a.micro_batch for a in state.actions if a.direction < 0 and a.virtual_stage == virtual_stage]
                cell.gradients = p2p.post_gradient_recvs([(i, outputs[i]) for i in order], state.step)
        if not self._is_first_cell(virtual_stage):
            order = [a.micro_batch for a in state.actions if a.kind == "F" and a.virtual_stage == virtual_stage]
            cell.activations = p2p.post_activation_recvs([(i, inputs[i]) for i in order], state.step)

    def _is_first_cell(self, virtual_stage: int) -> bool:
        """Whether this cell begins with the mini-batch's inputs."""
        return self.coord.is_first and virtual_stage == 0

    def _is_last_cell(self, virtual_stage: int) -> bool:
        """Whether this cell ends with the loss."""
        return self.coord.is_last and virtual_stage == len(self.links) - 1

    def _to_device(self, tensors: Tensors) -> Tensors:
        """Returns one micro-batch's tensors on the device; copied right before use, they occupy it only briefly."""
        return tuple(tensor.to(self.stage.device, non_blocking=True) for tensor in tensors)

    def _forward(self, state: StepState, action: Action) -> None:
        i, v, cell = action.micro_batch, action.virtual_stage, state.cells[action.virtual_stage]
        if cell.activations is not None:
            inputs = cell.activations.recv(i)
        else:
            assert state.inputs is not None
            inputs = self._to_device(state.inputs[i])
        start = self._mark()
        boundary = cell.output_boundaries[i]
        micro_batch = CellMicroBatch(inputs, cell.input_boundaries[i], boundary, state.step, state.offset + i, v)
        if state.train:
            cell.micro_batches[i] = micro_batch
        if state.train and (v, i) not in state.recomputed:
            outputs, metric = self.stage.forward_with_graph(micro_batch, self._targets(state, action))
        else:
            with torch.no_grad():
                outputs, metric = self.stage.forward(micro_batch, self._targets(state, action))
        self._record(action, start)
        if boundary is None:
            assert metric is not None
            state.results[i] = (outputs[0].detach(), metric)
        else:
            p2p = self.links[v].p2p
            assert p2p is not None
            p2p.send_activations(cast_to_boundary(outputs, boundary.tensors), boundary, i, state.step)

    def _recompute(self, state: StepState, action: Action) -> None:
        start = self._mark()
        micro_batch = state.cells[action.virtual_stage].micro_batches[action.micro_batch]
        self.stage.forward_with_graph(micro_batch, self._targets(state, action))
        self._record(action, start)

    def _backward(self, state: StepState, action: Action) -> None:
        i, cell = action.micro_batch, state.cells[action.virtual_stage]
        if not state.draining and self.on_drain is not None:
            self.on_drain()
        state.draining = True
        micro_batch = cell.micro_batches.pop(i)
        if cell.gradients is not None:
            gradients = cell.gradients.recv(i)
        else:
            objective = state.results[i][0]
            gradients = (torch.full_like(objective, state.scale),)
        start = self._mark()
        if action.kind == "I":
            input_gradients, cell.deferred[i] = self.stage.backward_input(micro_batch, gradients)
        else:
            with self._overlap_reduction(state, action):
                input_gradients = self.stage.backward(micro_batch, gradients)
        self._record(action, start)
        p2p = self.links[action.virtual_stage].p2p
        if p2p is not None and not self._is_first_cell(action.virtual_stage):
            p2p.send_gradients(input_gradients, micro_batch.input_boundary, i, state.step)

    def _overlap_reduction(self, state: StepState, action: Action) -> AbstractContextManager[None]:
        """A context that reduces gradients over replicas during a cell's last backward; does nothing in others."""
        if self.reducer is None or action not in state.last_grad_actions:
            return nullcontext()
        return self.reducer.overlap_backward(self.stage.parameters(action.virtual_stage))

    def _backward_weight(self, state: StepState, action: Action) -> None:
        start = self._mark()
        deferred = state.cells[action.virtual_stage].deferred.pop(action.micro_batch)
        for parameter in self.stage.backward_weight(deferred, action.virtual_stage):
            if self.reducer is not None and action in state.last_grad_actions:
                self.reducer.mark_ready([parameter])
        self._record(action, start)

    def _mark(self) -> Mark:
        return self.recorder.mark() if self.recorder is not None else None

    def _record(self, action: Action, start: Mark) -> None:
        if self.recorder is not None:
            self.recorder.record(action.kind, action.micro_batch, start, action.virtual_stage)

    def _targets(self, state: StepState, action: Action) -> Tensors:
        """Returns the targets of a micro-batch for the last cell, () for all others."""
        if not self._is_last_cell(action.virtual_stage):
            return ()
        assert state.targets is not None
        return self._to_device(state.targets[action.micro_batch])


_HANDLERS = {
    "F": Executor._forward,
    "R": Executor._recompute,
    "I": Executor._backward,
    "B": Executor._backward,
    "W": Executor._backward_weight,
}
