"""The optimizer step of a stage, over its replicas.

    .grad of R replicas --sum over replicas, overlapped with the last backward--> each replica's part
    --per-layer squares, one small all-reduce over all workers--> global norm, losses, finite flag
    --same decision everywhere--> clip, and step (``optimizer.py``: DeepSpeed), or skip

Frozen parameters (``requires_grad`` False) have no gradient, state, norm or weight decay. A stage with only frozen
parameters has no DeepSpeed engine, but takes part in the all-reduce of the norm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from suite.errors import CheckpointError
from suite.pipeline.model.layers import trainable
from suite.pipeline.model.ties import TiedParameters
from suite.pipeline.model.topology import ProcessGroups, RankCoord
from suite.pipeline.runtime.executor import LossSums
from suite.pipeline.runtime.gradient_reducer import GradientReducer
from suite.pipeline.runtime.recorder import Recorder
from suite.pipeline.runtime.stage import Stage
from suite.settings import OptimizerSettings
from suite.training.optimizer import ReplicatedState, ShardedState, State
from suite.training.update_rule import Key, UpdateFactors, learning_rate, make_optimizer, state_shapes


@dataclass(frozen=True)
class StepResult:
    """A step's result, equal on all workers: losses summed over the mini-batch, gradient norm, applied or not."""

    objective: float
    metrics: tuple[float, ...]
    grad_norm: float
    lr: float
    applied: bool
    layer_norms: tuple[float, ...] = ()
    """Gradient norm of each layer."""
    of_workers: tuple[tuple[float, ...], ...] = ()
    """The numbers that each worker gave, by rank."""


class StageOptimizer:
    """Updates one stage's parameters. All stages apply a step, or all skip it."""

    def __init__(
        self,
        stage: Stage,
        layers: int,
        ties: TiedParameters,
        coord: RankCoord,
        groups: ProcessGroups,
        settings: OptimizerSettings,
        sync_batchnorm_stats: bool = True,
        factors: UpdateFactors = lambda *_: (1.0, 1.0),
    ) -> None:
        """``layers`` is the number of layers of the model. The stage's BatchNorm statistics update only when the
        parameters do. Copies of a tied parameter have the ``factors`` of the first copy."""
        self.stage, self.coord, self._layers, self._ties, self._settings = stage, coord, layers, ties, settings
        self._trainable = {key: p for key, p in stage.named_parameters().items() if p.requires_grad}
        self._stats_over = groups.data_parallel if coord.replicas > 1 and sync_batchnorm_stats else None
        has_fp32 = {parameter.dtype for parameter in self._trainable.values()} == {torch.float32}
        sharded = coord.replicas > 1 and settings.state_names and has_fp32
        make_state = ShardedState if sharded else ReplicatedState
        of_each = {key: factors("{}.{}".format(*ties.first_copy(*key)), p) for key, p in self._trainable.items()}
        self._state = make_state(stage.layers, self._trainable, settings, coord, groups, stage.device, of_each)
        self.reducer: GradientReducer | None = None
        """For the executor, which knows when a step's gradients are complete. None without replicas."""
        self.on_gradients: Callable[[], None] | None = None
        """Called in each update when all gradients are complete, before they are clipped."""
        if coord.replicas > 1:
            parameters = list(self._trainable.values())
            self.reducer = GradientReducer(parameters, ties.parameters(), groups.data_parallel, self._state.shards())

    def update(
        self, sums: LossSums, step: int, recorder: Recorder | None = None, own: Sequence[float] = ()
    ) -> StepResult:
        """Reduces gradients over ties and replicas, all-reduces norms and losses, and applies or skips the step.

        ``sums`` is this worker's share of the losses; ``own`` are numbers that all get to know, equally many from each
        worker. Clears gradients in either case.
        ``recorder`` records the part after the all-reduce of norms, because before that a worker may wait for others.
        """
        gradients = self.finish_reduction()
        if self.on_gradients is not None:
            self.on_gradients()
        squares, totals, of_workers = self._all_reduce_norms(gradients, sums, own)
        start = recorder.mark() if recorder is not None else None
        norm = math.sqrt(sum(squares)) if all(map(math.isfinite, squares)) else float("nan")
        applied = math.isfinite(norm) and all(map(math.isfinite, totals))
        rate = learning_rate(step, self._settings)
        if applied:
            _clip([gradient for _, gradient in gradients], norm, self._settings)
            self._state.step(rate)
            if self.coord.replicas > 1:
                self._sync_ties()
        self.stage.running_stats.update(applied, self._stats_over)
        self.clear()
        if recorder is not None:
            recorder.record("U", -1, start)
        norms = tuple(math.sqrt(square) if math.isfinite(square) else square for square in squares)
        return StepResult(totals[0], tuple(totals[1:]), norm, rate, applied, norms, of_workers)

    def finish_reduction(self) -> list[tuple[Key, Tensor]]:
        """Finishes the reduction that the executor began: sums over ties and replicas, zeros where none came.

        Returns this worker's part of each gradient: all of it, or its ZeRO shard.
        """
        if self.reducer is not None:
            self.reducer.start_remaining()  # first, because the sum over ties waits for the slowest stage with a copy
        for parameter in self._trainable.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self._ties.sum_gradients()
        if self.reducer is not None:
            self.reducer.finish()
        return self._state.local_gradients()

    def gradient(self, key: Key) -> Tensor:
        """Returns the full gradient of a trainable parameter after ``finish_reduction``. All replicas must call it in
        the same order."""
        return self._state.gradient(key)

    def state(self, key: Key) -> State:
        """Returns the full optimizer state of a parameter, empty for a frozen one. All replicas must call it in the
        same order."""
        return self._state.state(key) if key in self._trainable else {}

    def load_state(self, key: Key, state: State) -> None:
        """Sets the full optimizer state of a trainable parameter, saved with any K, R and ZeRO stage.

        Raises CheckpointError for the state of another optimizer.
        """
        expected = state_shapes(tuple(self._trainable[key].shape), self._settings)
        dtypes = {torch.float32, self._trainable[key].dtype}
        saved = {name: tuple(value.shape) for name, value in sorted(state.items())}
        if saved != expected or not {value.dtype for value in state.values()} <= dtypes:
            raise CheckpointError(
                f"the optimizer state of layer {key[0]}, {key[1]} is {saved}, {self._settings.name} needs "
                f"{expected} in fp32; resume with the optimizer of the run that wrote it"
            )
        self._state.load_state(key, state)

    @torch.no_grad()
    def _all_reduce_norms(
        self, gradients: Sequence[tuple[Key, Tensor]], sums: LossSums, own: Sequence[float]
    ) -> tuple[list[float], list[float], tuple[tuple[float, ...], ...]]:
        """All-reduces each layer's sum of squared gradients, the loss sums, and each worker's own numbers, over all
        workers at once.

        The workers of a layer fill its entry (without ZeRO only replica 0's), and all others add zero. With R = 1 one
        worker fills it, so the sum is exact. The total, in layer order, then has the same bits at every K.
        """
        squares: list[list[Tensor]] = [[] for _ in range(self._layers)]
        # without ZeRO all replicas have the same sum
        counts_in_norm = self._state.is_sharded or self.coord.replica == 0
        for (layer, name), gradient in gradients if counts_in_norm else ():
            if self._ties.is_first_copy(layer, name):
                squares[layer].append(_square(gradient))
        zero = torch.zeros((), dtype=torch.float64, device=self.stage.device)
        vector = torch.stack(
            [torch.stack(parts).sum() if parts else zero for parts in squares]
            + [zero + total for total in (sums.objective, *sums.metrics)]
        )
        of_workers = torch.zeros(dist.get_world_size(), len(own), dtype=torch.float64)
        of_workers[self.coord.rank] = torch.tensor(own, dtype=torch.float64)
        vector = torch.cat([vector, of_workers.flatten().to(vector.device, non_blocking=True)])
        dist.all_reduce(vector)
        values = vector.tolist()
        end = self._layers + 1 + len(sums.metrics)
        firsts = range(end, len(values), len(own)) if own else ()
        numbers = tuple(tuple(values[first : first + len(own)]) for first in firsts)
        return values[: self._layers], values[self._layers : end], numbers

    @torch.no_grad()
    def _sync_ties(self) -> None:
        """Copies the first copy's values of tied parameters to the other stages.

        The rounding of a sum over three or more replicas depends on a gradient's position in the flat bucket of
        ``GradientReducer``, so the copies would drift apart in the last bit.
        """
        self._ties.broadcast_first_copy()
        self._state.accept_values(self._ties.parameters())

    def forget(self) -> None:
        """Drops the gradients and batch statistics of a mini-batch without applying them.

        All replicas must call it, because some gradients are already being reduced.
        """
        if self.reducer is not None:
            self.reducer.finish()
        self.stage.running_stats.update(False)
        self.clear()

    def clear(self) -> None:
        self._state.clear_gradients()


def single_device_update(module: nn.Module, settings: OptimizerSettings) -> Callable[[], None]:
    """Returns a stage's update of these parameters without communication, to measure its time."""
    parameters = list(trainable(module))
    optimizer = make_optimizer(parameters, settings) if parameters else None

    def update() -> None:
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if optimizer is None or not gradients:
            return
        norm = math.sqrt(float(torch.stack([_square(gradient) for gradient in gradients]).sum()))
        _clip(gradients, norm, settings)
        optimizer.step()

    return update


def _square(gradient: Tensor) -> Tensor:
    return torch.linalg.vector_norm(gradient, dtype=torch.float64).square()


@torch.no_grad()
def _clip(gradients: list[Tensor], norm: float, settings: OptimizerSettings) -> None:
    bound = settings.max_grad_norm
    if bound is not None and norm > bound and gradients:  # torch rejects an empty list
        torch._foreach_mul_(gradients, bound / norm)
