"""The optimizer step of a stage, over its replicas. Outside the benchmark's peers only this module imports deepspeed.

    .grad of R replicas --mean over replicas, overlapped with the last backward--> each replica's part
    --per-layer squares, one small all-reduce over all workers--> global norm, losses, finite flag
    --same decision everywhere--> clip and step (DeepSpeed), or skip

    ReplicatedState   each replica holds all gradients and optimizer state; no ZeRO
    ShardedState      each replica holds its 1/R of them; ZeRO-1

With R = 1 there is nothing to shard and each parameter stays a separate tensor, so results are bit-identical for all K.
ZeRO-2 and 3 are not supported: they shard gradients and weights per micro-batch, which costs a pipeline M times per
step. Adafactor's factored moments need whole matrices, which ZeRO flattens, so Adafactor always runs without ZeRO.

Frozen parameters (``requires_grad`` False) have no gradient, state, norm or weight decay. A stage with only frozen
parameters has no DeepSpeed engine, but takes part in the all-reduce of the norm.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from suite.errors import CheckpointError
from suite.pipeline.model.layers import trainable
from suite.pipeline.model.ties import TiedParameters
from suite.pipeline.model.topology import ProcessGroups, RankCoord
from suite.pipeline.runtime.executor import LossSums
from suite.pipeline.runtime.gradient_reducer import GradientReducer, Shards
from suite.pipeline.runtime.recorder import Recorder
from suite.pipeline.runtime.stage import Stage
from suite.settings import OptimizerSettings
from suite.training.update_rule import Key, UpdateFactors, learning_rate, make_optimizer, param_groups, state_shapes

State = dict[str, Tensor]


class ReplicatedState:
    """Whole gradients and optimizer state on every replica. All replicas must make the same calls in the same order."""

    is_sharded = False

    def __init__(
        self, module: nn.Module, parameters: Mapping[Key, nn.Parameter], settings: OptimizerSettings, coord: RankCoord,
        groups: ProcessGroups, device: torch.device, factors: Mapping[Key, tuple[float, float]],
    ) -> None:  # fmt: skip
        """``parameters`` are the trainable ones of ``module``, with the ``factors`` of their learning rate and weight
        decay. Without any there is no DeepSpeed engine."""
        self._parameters = parameters
        self._settings = settings
        self._step_on_device = settings.name == "adamw"  # the fused kernel needs it there, Adafactor on the host
        if parameters:
            self._inner = make_optimizer(param_groups(parameters, factors, settings), settings)
            self._engine = _initialize(module, self._inner, coord, groups, device, int(self.is_sharded))

    def step(self, rate: float) -> None:
        """Updates the parameters with this learning rate."""
        if not self._parameters:
            return
        for group in self._inner.param_groups:
            group["lr"] = rate * group["lr_factor"]
        self._engine.optimizer.step()
        assert not getattr(self._engine.optimizer, "overflow", False), "DeepSpeed skipped a step that was agreed on"

    def shards(self) -> Shards | None:
        """Returns which replica owns which gradients; None if each owns all of them."""
        return None

    def local_gradients(self) -> list[tuple[Key, Tensor]]:
        """Returns this replica's part of each averaged gradient: all of it, or its shard."""
        return [(key, cast(Tensor, parameter.grad)) for key, parameter in self._parameters.items()]

    def gradient(self, key: Key) -> Tensor:
        """Returns the full averaged gradient of a parameter."""
        return cast(Tensor, self._parameters[key].grad)

    def state(self, key: Key) -> State:
        """Returns the full optimizer state of a parameter; empty before the first step."""
        state = self._inner.state.get(self._parameters[key], {})
        return {name: value for name, value in state.items() if value is not None}

    def load_state(self, key: Key, state: State) -> None:
        """Sets the full optimizer state of a parameter."""
        parameter = self._parameters[key]
        self._inner.state[parameter] = {
            name: value.to("cpu" if name == "step" and not self._step_on_device else parameter.device)
            for name, value in state.items()
        }

    def accept_values(self, parameters: Sequence[nn.Parameter]) -> None:
        """Makes values that were written to parameters outside of ``step`` those that the next step updates."""

    def clear_gradients(self) -> None:
        """Drops all gradients, averaged or not."""
        for parameter in self._parameters.values():
            parameter.grad = None


class ShardedState(ReplicatedState):
    """A shard of the averaged gradients and of the optimizer state, as ZeRO-1 divides them."""

    is_sharded = True

    def __init__(
        self, module: nn.Module, parameters: Mapping[Key, nn.Parameter], settings: OptimizerSettings, coord: RankCoord,
        groups: ProcessGroups, device: torch.device, factors: Mapping[Key, tuple[float, float]],
    ) -> None:  # fmt: skip
        """Allocates the state before the first step, so that a checkpoint can be loaded into it."""
        super().__init__(module, parameters, settings, coord, groups, device, factors)
        from deepspeed import utils

        self._utils: Any = utils
        self._names = settings.state_names
        for group in self._inner.param_groups:
            flat = group["params"][0]
            self._inner.state[flat] = {
                "step": torch.zeros((), device=flat.device if self._step_on_device else "cpu"),
                **{name: torch.zeros_like(flat) for name in self._names},
            }
        self._engine.optimizer._lazy_init_hp_params_optimizer_state()

    def shards(self) -> Shards:
        optimizer, places = self._engine.optimizer, {}
        for parameters, offsets, size in zip(
            optimizer.round_robin_bit16_groups,
            optimizer.round_robin_bit16_offsets,
            optimizer.partition_size,
            strict=True,
        ):
            places.update({id(p): (offset, size) for p, offset in zip(parameters, offsets, strict=True)})
        return Shards(places)

    def local_gradients(self) -> list[tuple[Key, Tensor]]:
        optimizer = self._engine.optimizer
        optimizer.set_gradient_accumulation_boundary(True)
        # the second half of DeepSpeed's reduce_gradients: each replica takes its shard of the gradients, which are
        # averaged already; nothing is reduced here
        optimizer.overlapping_partition_gradients_reduce_epilogue()
        keys = {id(parameter): key for key, parameter in self._parameters.items()}
        local = []
        for group, parameters in enumerate(optimizer.params_in_partition):
            shards = [g for g in optimizer.averaged_gradients[group] if not getattr(g, "_zero_padding", False)]
            shards = shards[: len(parameters)]  # the rest is padding
            values = sum(map(Tensor.numel, shards))
            expected = optimizer.partition_size[group] - optimizer.groups_padding[group]
            assert values == expected, f"DeepSpeed gave shards of {values} values, this replica has {expected}"
            local += [(keys[id(p)], shard) for p, shard in zip(parameters, shards, strict=True)]
        return local

    def gradient(self, key: Key) -> Tensor:
        return cast(Tensor, self._utils.safe_get_full_grad(self._parameters[key]))

    def state(self, key: Key) -> State:
        parameter = self._parameters[key]
        state = {name: self._utils.safe_get_full_optimizer_state(parameter, name) for name in self._names}
        expected = state_shapes(tuple(parameter.shape), self._settings)
        return {**state, "step": self._step_counts[0].clone()} if "step" in expected else state

    def load_state(self, key: Key, state: State) -> None:
        parameter = self._parameters[key]
        for name in self._names:
            self._utils.safe_set_full_optimizer_state(parameter, state[name].to(parameter.device), name)
        for count in self._step_counts if "step" in state else ():
            count.copy_(state["step"])

    def accept_values(self, parameters: Sequence[nn.Parameter]) -> None:
        for parameter in parameters:
            self._utils.safe_set_full_fp32_param(parameter, parameter.data)

    def clear_gradients(self) -> None:
        optimizer = self._engine.optimizer
        for group in optimizer.averaged_gradients:
            optimizer.averaged_gradients[group] = None
        optimizer.zero_grad(set_to_none=True)
        super().clear_gradients()

    @property
    def _step_counts(self) -> list[Tensor]:
        """Of each group; all are equal."""
        return [self._inner.state[group["params"][0]]["step"] for group in self._inner.param_groups]


def _initialize(
    module: nn.Module,
    inner: torch.optim.Optimizer,
    coord: RankCoord,
    groups: ProcessGroups,
    device: torch.device,
    zero_stage: int,
) -> Any:
    """Returns the engine. Its own clipping and norm are off: they ignore ties, depend on K, and the norm would cost two
    all-reduces per step."""
    os.environ.update(
        RANK=str(coord.rank),
        WORLD_SIZE=str(coord.stages * coord.replicas),
        DS_ACCELERATOR=device.type,
        LOCAL_RANK=str(device.index or 0),  # DeepSpeed moves the module to this device, whatever its own is
    )
    os.environ.pop("OMPI_COMM_WORLD_LOCAL_RANK", None)  # a job under MPI has its own, and DeepSpeed wants them equal
    import deepspeed

    deepspeed.utils.logger.setLevel(logging.ERROR)
    # otherwise DeepSpeed compiles an all-reduce kernel for inference at the first start, for half a minute
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    for parameter in module.parameters():
        parameter.model_parallel = True  # type: ignore[attr-defined]  # otherwise DeepSpeed treats stages as copies
    mpu = SimpleNamespace(
        get_data_parallel_group=lambda: groups.replicas, get_data_parallel_rank=lambda: coord.replica,
        get_data_parallel_world_size=lambda: coord.replicas, get_model_parallel_group=lambda: groups.stages,
        get_model_parallel_rank=lambda: coord.stage, get_model_parallel_world_size=lambda: coord.stages,
    )  # fmt: skip
    engine, *_ = deepspeed.initialize(
        model=module, optimizer=inner, mpu=mpu, dist_init_required=False,
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "zero_optimization": {
                "stage": zero_stage, "overlap_comm": False, "contiguous_gradients": False,
                "compute_grad_norm": not zero_stage,  # not a valid option without ZeRO
            },
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 0.0,
        },
    )  # fmt: skip
    assert engine.device == device, f"DeepSpeed moved the stage from {device} to {engine.device}"
    return engine


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
    peak_bytes: int = 0
    """Memory of the worker with the highest peak."""

    @property
    def culprits(self) -> tuple[int, ...]:
        """Layers with non-finite gradients, in order."""
        return tuple(layer for layer, norm in enumerate(self.layer_norms) if not math.isfinite(norm))


class StageOptimizer:
    """Updates one stage's parameters. All stages apply a step, or all skip it."""

    def __init__(
        self, stage: Stage, layers: int, ties: TiedParameters, coord: RankCoord, groups: ProcessGroups,
        settings: OptimizerSettings, sync_batchnorm_stats: bool = True, factors: UpdateFactors = lambda *_: (1.0, 1.0),
    ) -> None:  # fmt: skip
        """``layers`` is the number of layers of the model. The stage's BatchNorm statistics update only when the
        parameters do. Copies of a tied parameter have the ``factors`` of its owner."""
        self.stage, self.coord, self._layers, self._ties, self._settings = stage, coord, layers, ties, settings
        self._trainable = {key: p for key, p in stage.named_parameters().items() if p.requires_grad}
        self._stats_over = groups.replicas if coord.replicas > 1 and sync_batchnorm_stats else None
        sharded = coord.replicas > 1 and settings.state_names and self._trainable
        make_state = ShardedState if sharded else ReplicatedState
        of_each = {key: factors("{}.{}".format(*ties.owner(*key)), p) for key, p in self._trainable.items()}
        self._state = make_state(stage.layers, self._trainable, settings, coord, groups, stage.device, of_each)
        self.reducer: GradientReducer | None = None
        """For the executor, which knows when a step's gradients are complete. None without replicas."""
        if coord.replicas > 1:
            parameters = list(self._trainable.values())
            self.reducer = GradientReducer(parameters, ties.parameters(), groups.replicas, self._state.shards())

    def update(self, sums: LossSums, step: int, recorder: Recorder | None = None, peak_bytes: int = 0) -> StepResult:
        """Reduces gradients over ties and replicas, agrees on norm and finiteness, and applies or skips the step.

        ``sums`` is this worker's share of the losses, ``peak_bytes`` its memory. Clears gradients in either case.
        ``recorder`` records the part after the agreement, because before that a worker may wait for others.
        """
        gradients = self.finish_reduction()
        squares, totals, peaks = self._agree(gradients, sums, peak_bytes)
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
        return StepResult(totals[0], tuple(totals[1:]), norm, rate, applied, norms, int(max(peaks)))

    def finish_reduction(self) -> list[tuple[Key, Tensor]]:
        """Finishes the reduction that the executor began: sums over ties, means over replicas, zeros where none came.

        Returns this worker's part of each gradient: all of it, or its ZeRO shard.
        """
        if self.reducer is not None:
            self.reducer.flush()  # first, because the sum over ties waits for the slowest stage with a copy
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
        if {name: (tuple(value.shape), value.dtype) for name, value in state.items()} != {
            name: (shape, torch.float32) for name, shape in expected.items()
        }:
            saved = {name: tuple(value.shape) for name, value in sorted(state.items())}
            raise CheckpointError(
                f"the optimizer state of layer {key[0]}, {key[1]} is {saved}, {self._settings.name} needs "
                f"{expected} in fp32; resume with the optimizer of the run that wrote it"
            )
        self._state.load_state(key, state)

    @torch.no_grad()
    def _agree(
        self, gradients: Sequence[tuple[Key, Tensor]], sums: LossSums, peak_bytes: int
    ) -> tuple[list[float], list[float], list[float]]:
        """All-reduces each layer's sum of squared gradients, the loss sums, and each worker's peak memory, over all
        workers at once.

        Only the workers of a layer fill its entry and all others have zero, so the sum is exact and the total, in layer
        order, has the same bits at every K.
        """
        squares: list[list[Tensor]] = [[] for _ in range(self._layers)]
        counts = self._state.is_sharded or self.coord.replica == 0  # without ZeRO all replicas have the same mean
        for (layer, name), gradient in gradients if counts else ():
            if self._ties.owned(layer, name):
                squares[layer].append(_square(gradient))
        zero = torch.zeros((), dtype=torch.float64, device=self.stage.device)
        vector = torch.stack(
            [torch.stack(parts).sum() if parts else zero for parts in squares]
            + [zero + total for total in (sums.objective, *sums.metrics)]
        )
        peaks = torch.zeros(dist.get_world_size(), dtype=torch.float64)
        peaks[self.coord.rank] = peak_bytes
        vector = torch.cat([vector, peaks.to(vector.device, non_blocking=True)])
        dist.all_reduce(vector)
        values = vector.tolist()
        end = self._layers + 1 + len(sums.metrics)
        return values[: self._layers], values[self._layers : end], values[end:]

    @torch.no_grad()
    def _sync_ties(self) -> None:
        """Copies the owner's values of tied parameters to the other stages.

        The rounding of a sum over three or more replicas depends on a gradient's position in the flat bucket of
        ``GradientReducer``, so the copies would drift apart in the last bit.
        """
        self._ties.broadcast_owner()
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
        """Drops all gradients, reduced or not."""
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
