"""The executor: runs a stage's list of actions, whatever schedule made it.

F3   receive activations 3 -> run the cell -> send its outputs         (last cell: compute the loss)
R3   run the cell again on the saved inputs, this time with a graph
B3   receive gradients 3 -> backward -> send the inputs' gradients
I3   the same, but weight gradients are deferred
W3   add the weight gradients that I3 deferred
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from suite.device import is_host, module_of
from suite.errors import StallError
from suite.pipeline.model.changing_buffers import copies_of_buffers, replaced
from suite.pipeline.model.layers import Tensors
from suite.pipeline.model.microbatch import ReplicaBatch
from suite.pipeline.model.topology import RankCoord
from suite.pipeline.runtime.boundary import CutSpec, cast_to_boundary
from suite.pipeline.runtime.cell_layout import CellLayout
from suite.pipeline.runtime.gradient_reducer import GradientReducer
from suite.pipeline.runtime.metadata import BoundaryMetadata
from suite.pipeline.runtime.p2p import P2PCommunicator
from suite.pipeline.runtime.recorder import Mark, Recorder
from suite.pipeline.runtime.skip import SkipLayout
from suite.pipeline.runtime.stage import CellMicroBatch, Stage
from suite.pipeline.runtime.step_state import CellState, StepState
from suite.pipeline.runtime.worker_status import DeviceMark, WorkerStatus
from suite.pipeline.schedule.action import Action, last_grad_actions, of_kind
from suite.pipeline.schedule.config import ScheduleConfig


@dataclass(frozen=True)
class LossSums:
    """Loss sums over a replica's share of a mini-batch, or over one micro-batch; zero on stages without the loss."""

    objective: float = 0.0
    metrics: tuple[float, ...] = (0.0,)


@dataclass(frozen=True)
class CellLinks:
    """How a cell communicates with the others: where its skips go, and its messages (None where K = 1)."""

    skips: SkipLayout
    p2p: P2PCommunicator | None


class Executor:
    """Runs mini-batches through one stage.

    The backward of the summed objective starts with 1 / the mini-batch's divisor, so the sum of the replicas' gradients
    is the gradient of the mini-batch's mean. After ``train`` the parameters' ``.grad`` hold this replica's gradients;
    with R > 1 the reducer has already begun to replace them by their sums, except those of tied parameters.
    """

    def __init__(
        self,
        coord: RankCoord,
        stage: Stage,
        links: Sequence[CellLinks],
        schedule_config: ScheduleConfig,
        status: WorkerStatus | None = None,
        metric_count: int = 1,
    ) -> None:
        """``links`` has an entry for each cell; every action is reported to ``status``. ``metric_count`` is how many
        the loss returns."""
        assert len(links) == len(stage.cells) == schedule_config.virtual_stages, (
            len(links),
            len(stage.cells),
            schedule_config,
        )
        assert all((cell_links.p2p is None) == (coord.stages == 1) for cell_links in links)
        self.coord, self.stage, self.links, self.schedule_config = coord, stage, links, schedule_config
        self.status, self.metric_count = status or WorkerStatus(), metric_count
        self.status.stage = stage
        self.recorder: Recorder | None = None
        """Set for steps that are traced."""
        self.profiling = False
        """Whether torch.profiler records; each action is then a span."""
        self.reducer: GradientReducer | None = None
        """Set where there are replicas; gradients are passed to it as soon as they are complete. The caller runs its
        ``finish`` after each ``train``."""
        self.on_first_backward: Callable[[], None] | None = None
        """Called in each training step before its first backward waits for a gradient: the bubble of stage 0."""
        self._layouts: dict[int, CellLayout] = {}
        """Those of the last mini-batch, by cell; often the next one has the same."""
        waits = schedule_config.transport == "nccl" and coord.stages > 1
        self._cold = {True, False} if waits else set()
        """Modes, training or not, in which no kernel has been launched. On NCCL a first launch may wait for the posted
        receives (``launch.worker.gpu_environment``)."""

    def train(self, batch: ReplicaBatch | None, step: int) -> LossSums:
        """Runs the actions of one mini-batch. Only the stages with the first cell and with the loss need ``batch``.

        Raises StallError, naming this stage and its action, when a message does not arrive in time.
        """
        assert self.reducer is None or self.reducer.idle, "gradients of the step before were not finished"
        self.stage.train(True)
        sums = self._run(batch, step, train=True)
        with self.status.waiting_for("its device to finish the step"):
            objective, *metrics = sums.sum(0).tolist()
        return LossSums(objective, tuple(metrics))

    def prefetch_shapes(self, batch: ReplicaBatch) -> None:
        """Infers the shapes of a future mini-batch on the first stage. New shapes take a while, so another thread may
        call this ahead of time."""
        if self.coord.is_first and not self._is_last_cell(0):
            for cut in set(map(CutSpec.of, batch.inputs)):
                self.stage.infer_output(cut)

    def evaluate(self, batch: ReplicaBatch | None, step: int = 0) -> list[LossSums]:
        """Runs the forwards only, with dropout off. Returns the sums of each micro-batch, none before the last stage.

        Leaves no trace in the stage: the next ``train`` gives the same bits as without it.
        """
        self.stage.train(False)
        with replaced(copies_of_buffers(self.stage.layers)):  # a layer may change them in evaluation, too
            sums = self._run(batch, step, train=False)
        with self.status.waiting_for("its device to finish an evaluation"):
            return [LossSums(objective, tuple(metrics)) for objective, *metrics in sums.tolist()]

    def _run(self, batch: ReplicaBatch | None, step: int, train: bool) -> Tensor:
        """Returns objective and metrics of each micro-batch, (M, 1 + metrics) in fp64; M = 0 before the last stage."""
        status_step = step if train else None
        self.status.begin("open", status_step)
        try:
            state = self._begin(batch, step, train)
            with self.stage.weights_cast_once():
                for action in state.actions:
                    self.status.begin(action, status_step)
                    self._start_cell(state, action.virtual_stage)
                    with torch.profiler.record_function(str(action)) if self.profiling else nullcontext():
                        _HANDLERS[action.kind](self, state, action)
                    if self.reducer is not None and action in state.last_grad_actions:
                        self.reducer.mark_ready(self.stage.parameters(action.virtual_stage))
            self.status.begin("close", status_step)
            self._exchange_metadata(state, len(self.links))  # a replica without micro-batches has done none of it
            for cell_links in self.links:
                if cell_links.p2p is not None:
                    cell_links.p2p.wait_for_sends()
        except StallError as error:
            action_or_phase = self.status.action
            at = f"at {action_or_phase}" if isinstance(action_or_phase, Action) else "at its first or last messages"
            when = f"step {step + 1}" if train else "evaluation"
            raise type(error)(f"{self.coord}, {when}, {at}: {error}") from error
        sums = [
            torch.cat([objective.view(1), metrics.view(-1)]).double()
            for _, (objective, metrics) in sorted(state.results.items())
        ]
        return torch.stack(sums) if sums else torch.zeros(0, 1 + self.metric_count, dtype=torch.float64)

    def _begin(self, batch: ReplicaBatch | None, step: int, train: bool) -> StepState:
        """Exchanges the metadata of the first cell, and posts its first receives."""
        coord = self.coord
        assert batch is not None or not (coord.is_first or coord.has_loss), (
            "the first and last stage need the mini-batch"
        )
        metadata = self._recv_metadata(0, batch)
        count = len(metadata.cuts)
        actions = self.schedule_config.actions(coord.stages, count, train)[coord.stage]
        recomputed, splits = of_kind(actions, "R"), of_kind(actions, "I")
        state = StepState(step, metadata.offset, train, actions, recomputed, splits, last_grad_actions(actions))
        self._add_cell(state, metadata)
        if batch is not None:
            assert len(batch) == count, f"{len(batch)} micro-batches, the metadata has {count}"
            state.inputs = batch.inputs if coord.is_first else None
            state.targets = batch.targets if coord.has_loss else None
            state.loss_gradient = 1 / batch.divisor
        if train in self._cold and count:
            self._exchange_metadata(state, len(self.links))
            self._warm_up(state)
            self._cold.discard(train)
        self._start_cell(state, 0)
        return state

    def _recv_metadata(self, virtual_stage: int, batch: ReplicaBatch | None) -> BoundaryMetadata:
        """Returns the metadata of a cell's input boundary."""
        cell_links = self.links[virtual_stage]
        if self._is_first_cell(virtual_stage):
            assert batch is not None
            return BoundaryMetadata(tuple(map(CutSpec.of, batch.inputs)), batch.offset)
        assert cell_links.p2p is not None
        return cell_links.p2p.recv_metadata(cell_links.skips.names)

    def _exchange_metadata(self, state: StepState, count: int) -> None:
        """Receives the metadata of the first ``count`` cells, where that has not happened."""
        while len(state.cells) < count:
            self._add_cell(state, self._recv_metadata(len(state.cells), None))

    def _add_cell(self, state: StepState, metadata: BoundaryMetadata) -> None:
        """Lays out the next cell, and sends the metadata of the cell behind it."""
        virtual_stage = len(state.cells)
        links, is_last = self.links[virtual_stage], self._is_last_cell(virtual_stage)
        layout = self._layouts.get(virtual_stage)
        if layout is None or layout.cuts != metadata.cuts:
            infer_output = None if is_last else partial(self.stage.infer_output, virtual_stage=virtual_stage)
            layout = self._layouts[virtual_stage] = CellLayout.of(metadata.cuts, links.skips, infer_output)
        state.cells.append(CellState(layout))
        if links.p2p is not None and not is_last:
            links.p2p.send_metadata(BoundaryMetadata(layout.next_cuts, metadata.offset), links.skips.names)

    def _start_cell(self, state: StepState, virtual_stage: int) -> None:
        """Exchanges a cell's metadata and posts its first receives, if that has not happened."""
        self._exchange_metadata(state, virtual_stage + 1)
        cell, p2p = state.cells[virtual_stage], self.links[virtual_stage].p2p
        if p2p is None or cell.posted:
            return
        cell.posted = True
        forwards, backwards = (
            [a.micro_batch for a in state.actions if a.virtual_stage == virtual_stage and a.direction == direction]
            for direction in (1, -1)
        )
        inputs, outputs = cell.layout.inputs, cell.layout.outputs
        if state.train and outputs is not None:
            cell.recv_gradients = p2p.post_recvs("gradients", [(i, outputs[i]) for i in backwards], state.step)
        if not self._is_first_cell(virtual_stage):
            cell.recv_activations = p2p.post_recvs("activations", [(i, inputs[i]) for i in forwards], state.step)

    def _warm_up(self, state: StepState) -> None:
        """Launches the kernels of all cells once."""
        for virtual_stage, cell in enumerate(state.cells):
            before, behind = cell.layout.inputs[0], cell.layout.output(0)
            inputs = tuple(spec.empty(self.stage.device).zero_() for spec in before.tensors)
            micro_batch = CellMicroBatch(inputs, before, behind, state.step, state.offset, virtual_stage)
            self.stage.warm_up(micro_batch, self._targets(state, Action("F", 0, virtual_stage)), state.train)

    def _is_first_cell(self, virtual_stage: int) -> bool:
        """Whether this cell begins with the mini-batch's inputs."""
        return self.coord.is_first and virtual_stage == 0

    def _is_last_cell(self, virtual_stage: int) -> bool:
        """Whether this cell ends with the loss."""
        return self.coord.has_loss and virtual_stage == len(self.links) - 1

    def _to_device(self, tensors: Tensors) -> Tensors:
        """Returns one micro-batch's tensors on the device; copied right before use, they occupy it only briefly."""
        return tuple(tensor.to(self.stage.device, non_blocking=True) for tensor in tensors)

    def _forward(self, state: StepState, action: Action) -> None:
        i, v, cell = action.micro_batch, action.virtual_stage, state.cells[action.virtual_stage]
        if cell.recv_activations is not None:
            inputs = cell.recv_activations(i)
        else:
            assert state.inputs is not None
            inputs = self._to_device(state.inputs[i])
        start = self._mark(action, received=cell.recv_activations is not None)
        boundary = cell.layout.output(i)
        splits = (v, i) in state.splits
        micro_batch = CellMicroBatch(inputs, cell.layout.inputs[i], boundary, state.step, state.offset + i, v, splits)
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
            p2p.send("activations", cast_to_boundary(outputs, boundary.tensors), boundary, i, state.step)

    def _recompute(self, state: StepState, action: Action) -> None:
        start = self._mark(action)
        micro_batch = state.cells[action.virtual_stage].micro_batches[action.micro_batch]
        self.stage.forward_with_graph(micro_batch, self._targets(state, action))
        self._record(action, start)

    def _backward(self, state: StepState, action: Action) -> None:
        i, cell = action.micro_batch, state.cells[action.virtual_stage]
        if not state.backward_begun and self.on_first_backward is not None:
            self.on_first_backward()
        state.backward_begun = True
        micro_batch = cell.micro_batches.pop(i)
        if cell.recv_gradients is not None:
            gradients = cell.recv_gradients(i)
        else:
            gradients = (torch.full_like(state.results[i][0], state.loss_gradient),)
        start = self._mark(action, received=cell.recv_gradients is not None)
        if action.kind == "I":
            input_gradients, cell.deferred[i] = self.stage.backward_input(micro_batch, gradients)
        else:
            reducer = self.reducer if action in state.last_grad_actions else None
            parameters = self.stage.parameters(action.virtual_stage)
            with reducer.overlap_backward(parameters) if reducer is not None else nullcontext():
                input_gradients = self.stage.backward(micro_batch, gradients)
        self._record(action, start)
        p2p = self.links[action.virtual_stage].p2p
        if p2p is not None and not self._is_first_cell(action.virtual_stage):
            p2p.send("gradients", input_gradients, micro_batch.input_boundary, i, state.step)

    def _backward_weight(self, state: StepState, action: Action) -> None:
        start = self._mark(action)
        deferred = state.cells[action.virtual_stage].deferred.pop(action.micro_batch)
        for parameter in self.stage.backward_weight(deferred, action.virtual_stage):
            if self.reducer is not None and action in state.last_grad_actions:
                self.reducer.mark_ready([parameter])
        self._record(action, start)

    def _mark(self, action: Action, received: bool = False) -> Mark:
        """Marks the point where an action's computation begins; before it a message was ``received``, if it has one."""
        self._mark_on_device(action, "a message" if received else "")
        return self.recorder.mark() if self.recorder is not None else None

    def _record(self, action: Action, start: Mark) -> None:
        self._mark_on_device(action, "")
        if self.recorder is not None:
            self.recorder.record(action.kind, action.micro_batch, start, action.virtual_stage)

    def _mark_on_device(self, action: Action, waiting: str) -> None:
        """Lets ``status`` know when the device has come so far, and what it waits for until then."""
        if not is_host(self.stage.device):
            event = module_of(self.stage.device).Event()
            event.record()
            self.status.device_marks.append(DeviceMark(action, waiting, event))

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
