"""The optimizer step: one DeepSpeed engine per stage over its replicas. Only this module imports deepspeed.

    .grad of R replicas --mean over replicas, overlapped with the last backward--> each replica's shard (DeepSpeed)
    --per-layer squares, one small all-reduce over all workers--> global norm, losses, finite flag
    --same decision everywhere--> clip and step (DeepSpeed), or skip

With R = 1 DeepSpeed runs without ZeRO and each parameter stays a separate tensor, so results are bit-identical for all
K. With R > 1 it uses ZeRO-1: each replica keeps 1/R of the optimizer state. ZeRO-2 and 3 are not supported: they shard
gradients and weights per micro-batch, which costs a pipeline M times per step. Adafactor's factored moments need whole
matrices, which ZeRO flattens, so Adafactor always runs without ZeRO.

Frozen parameters (``requires_grad`` False) have no gradient, state, norm or weight decay. A stage with only frozen
parameters has no DeepSpeed engine, but takes part in the all-reduce of the norm.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from suite.errors import CheckpointError
from suite.pipeline.model.batchnorm import RunningStats
from suite.pipeline.model.layers import trainable
from suite.pipeline.model.ties import TiedParameters
from suite.pipeline.model.topology import Group, ProcessGroups, RankCoord
from suite.pipeline.runtime.executor import LossSums
from suite.pipeline.runtime.gradient_reducer import GradientReducer
from suite.pipeline.runtime.recorder import Recorder
from suite.settings import OptimizerSettings
from suite.training.learning_rate import learning_rate

State = dict[str, Tensor]

_STATE_NAMES: dict[str, tuple[str, ...]] = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "rmsprop": ("square_avg", "momentum_buffer"),
}
"""Optimizer state per value, beside the step count; ZeRO shards it. RMSProp without momentum has only the first."""
_ADAFACTOR = {True: ("row_var", "col_var"), False: ("variance",)}  # key: whether the parameter is a matrix


@dataclass(frozen=True)
class StepResult:
    """A step's result, equal on all workers: losses summed over the mini-batch, gradient norm, applied or not."""

    objective: float
    metric: float
    grad_norm: float
    lr: float
    applied: bool
    layer_norms: tuple[float, ...] = ()
    """Gradient norm of each layer."""

    @property
    def culprits(self) -> tuple[int, ...]:
        """Layers with non-finite gradients, in order."""
        return tuple(layer for layer, norm in enumerate(self.layer_norms) if not math.isfinite(norm))


class StageOptimizer:
    """Updates one stage's parameters. All stages apply a step, or all skip it."""

    def __init__(
        self, module: nn.Module, named: dict[tuple[int, str], nn.Parameter], layers: int, ties: TiedParameters,
        coord: RankCoord, groups: ProcessGroups, device: torch.device, settings: OptimizerSettings,
        averages: RunningStats | None = None, averages_over_replicas: bool = True,
    ) -> None:  # fmt: skip
        """``named`` are the stage's parameters by (layer, name); ``layers`` is the number of layers of the model.
        ``averages`` are the running statistics of the stage's BatchNorms; they update only when the parameters do."""
        self._named = {key: parameter for key, parameter in named.items() if parameter.requires_grad}
        self._layers, self._ties = layers, ties
        self._coord, self._device, self._settings = coord, device, settings
        self._averages = averages
        self.reducer = (
            GradientReducer(list(self._named.values()), ties.parameters(), groups.replicas)
            if coord.replicas > 1
            else None
        )
        """For the executor, which knows when a step's gradients are complete."""
        self._averaged_over = groups.replicas if coord.replicas > 1 and averages_over_replicas else None
        self._state_names = _state_names(settings)
        self._zero = coord.replicas > 1 and bool(self._state_names) and bool(self._named)
        self._step_on_device = settings.name == "adamw"  # the fused kernel needs it there, Adafactor on the host
        if not self._named:
            return
        self._inner = _make_optimizer(list(self._named.values()), settings)
        self._engine = _initialize(module, self._inner, coord, groups, zero_stage=1 if self._zero else 0)
        if self._zero:
            self._allocate_sharded_state()

    def update(self, sums: LossSums, step: int, recorder: Recorder | None = None) -> StepResult:
        """Reduces gradients over ties and replicas, agrees on norm and finiteness, and applies or skips the step.

        ``sums`` is this worker's share of the losses. Clears gradients in either case. ``recorder`` records the part
        after the agreement, because before that a worker may wait for others.
        """
        reduced = self.reduce()
        squares, totals = self._agree(reduced, sums)
        start = recorder.mark() if recorder is not None else None
        norm = math.sqrt(sum(squares)) if all(map(math.isfinite, squares)) else float("nan")
        applied = math.isfinite(norm) and all(map(math.isfinite, totals))
        rate = learning_rate(step, self._settings)
        if applied:
            self._clip(reduced, norm)
            if self._named:
                self._step(rate)
            if self._coord.replicas > 1:
                self._sync_ties()
        if self._averages is not None:
            self._averages.update(applied, self._averaged_over)
        self.clear()
        if recorder is not None:
            recorder.record("U", -1, start)
        norms = tuple(math.sqrt(square) if math.isfinite(square) else square for square in squares)
        return StepResult(totals[0], totals[1], norm, rate, applied, norms)

    def _step(self, rate: float) -> None:
        for group in self._inner.param_groups:
            group["lr"] = rate
        self._engine.optimizer.step()
        assert not getattr(self._engine.optimizer, "overflow", False), "DeepSpeed skipped a step that was agreed on"

    def reduce(self) -> list[tuple[tuple[int, str], Tensor]]:
        """Finishes the reduction that the executor began: sums over ties, means over replicas, zeros where none came.

        Returns this worker's part of each gradient: all of it, or its ZeRO shard.
        """
        if self.reducer is not None:
            self.reducer.flush()  # first, because the sum over ties waits for the slowest stage with a copy
        for parameter in self._named.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self._ties.sum_gradients()
        if self.reducer is not None:
            self.reducer.finish()
        return self._local_gradients()

    def gradient(self, key: tuple[int, str]) -> Tensor:
        """Returns the full gradient of a trainable parameter after ``reduce``. All replicas must call it in the same
        order."""
        parameter = self._named[key]
        if not self._zero:
            return cast(Tensor, parameter.grad)
        from deepspeed.utils import safe_get_full_grad

        return cast(Tensor, safe_get_full_grad(parameter))

    def state(self, key: tuple[int, str]) -> State:
        """Returns the full optimizer state of a parameter, empty for a frozen one. All replicas must call it in the
        same order."""
        if key not in self._named:
            return {}
        parameter = self._named[key]
        if not self._zero:
            return {name: value for name, value in self._inner.state.get(parameter, {}).items() if value is not None}
        from deepspeed.utils import safe_get_full_optimizer_state

        flat = self._inner.state[self._inner.param_groups[0]["params"][0]]
        state = {name: cast(Tensor, safe_get_full_optimizer_state(parameter, name)) for name in self._state_names}
        return {"step": flat["step"].clone(), **state}

    def load_state(self, key: tuple[int, str], state: State) -> None:
        """Sets the full optimizer state of a trainable parameter, saved with any K, R and ZeRO stage.

        Raises CheckpointError for the state of another optimizer.
        """
        parameter = self._named[key]
        expected = _state_shapes(tuple(parameter.shape), self._state_names)
        if {name: (tuple(value.shape), value.dtype) for name, value in state.items()} != {
            name: (shape, torch.float32) for name, shape in expected.items()
        }:
            saved = {name: tuple(value.shape) for name, value in sorted(state.items())}
            raise CheckpointError(
                f"the optimizer state of layer {key[0]}, {key[1]} is {saved}, {self._settings.name} needs "
                f"{expected} in fp32; resume with the optimizer of the run that wrote it"
            )
        if not self._zero:
            self._inner.state[parameter] = {
                name: value.to("cpu" if name == "step" and not self._step_on_device else self._device)
                for name, value in state.items()
            }
            return
        from deepspeed.utils import safe_set_full_optimizer_state

        for name in self._state_names:
            safe_set_full_optimizer_state(parameter, state[name].to(self._device), name)
        self._inner.state[self._inner.param_groups[0]["params"][0]]["step"].copy_(state["step"])

    def _local_gradients(self) -> list[tuple[tuple[int, str], Tensor]]:
        """Returns this worker's part of each averaged gradient: all of it, or its ZeRO shard."""
        if not self._zero:
            return [(key, cast(Tensor, parameter.grad)) for key, parameter in self._named.items()]
        optimizer = self._engine.optimizer
        optimizer.set_gradient_accumulation_boundary(True)
        # the second half of DeepSpeed's reduce_gradients: each replica takes its shard of the gradients, which are
        # averaged already; nothing is reduced here
        optimizer.overlapping_partition_gradients_reduce_epilogue()
        keys = {id(parameter): key for key, parameter in self._named.items()}
        local = []
        for group, parameters in enumerate(optimizer.params_in_partition):
            shards = [g for g in optimizer.averaged_gradients[group] if not getattr(g, "_zero_padding", False)]
            shards = shards[: len(parameters)]  # the rest is padding
            values = sum(map(Tensor.numel, shards))
            expected = optimizer.partition_size[group] - optimizer.groups_padding[group]
            assert values == expected, f"DeepSpeed gave shards of {values} values, this replica has {expected}"
            local += [(keys[id(p)], shard) for p, shard in zip(parameters, shards, strict=True)]
        return local

    @torch.no_grad()
    def _agree(
        self, reduced: Sequence[tuple[tuple[int, str], Tensor]], sums: LossSums
    ) -> tuple[list[float], list[float]]:
        """All-reduces each layer's sum of squared gradients, and the loss sums, over all workers at once.

        Only the workers of a layer fill its entry and all others have zero, so the sum is exact and the total, in layer
        order, has the same bits at every K.
        """
        squares: list[list[Tensor]] = [[] for _ in range(self._layers)]
        counts = self._zero or self._coord.replica == 0  # without ZeRO all replicas have the same mean
        for (layer, name), gradient in reduced if counts else ():
            if self._ties.owned(layer, name):
                squares[layer].append(_square(gradient))
        zero = torch.zeros((), dtype=torch.float64, device=self._device)
        vector = torch.stack(
            [torch.stack(parts).sum() if parts else zero for parts in squares]
            + [zero + sums.objective, zero + sums.metric]
        )
        dist.all_reduce(vector)
        values = vector.tolist()
        return values[: self._layers], values[self._layers :]

    @torch.no_grad()
    def _clip(self, reduced: Sequence[tuple[tuple[int, str], Tensor]], norm: float) -> None:
        bound = self._settings.max_grad_norm
        if bound is not None and norm > bound and reduced:  # torch rejects an empty list
            torch._foreach_mul_([gradient for _, gradient in reduced], bound / norm)

    @torch.no_grad()
    def _sync_ties(self) -> None:
        """Copies the owner's values of tied parameters to the other stages.

        The rounding of a sum over three or more replicas depends on a gradient's position in DeepSpeed's buffer, so the
        copies would drift apart in the last bit.
        """
        self._ties.broadcast_owner()
        if self._zero:
            from deepspeed.utils import safe_set_full_fp32_param

            for parameter in self._ties.parameters():
                safe_set_full_fp32_param(parameter, parameter.data)

    def forget(self) -> None:
        """Drops the gradients and batch statistics of a mini-batch without applying them.

        All replicas must call it, because some gradients are already being reduced.
        """
        if self.reducer is not None:
            self.reducer.finish()
        if self._averages is not None:
            self._averages.update(False, self._averaged_over)
        self.clear()

    def clear(self) -> None:
        """Drops all gradients, reduced or not."""
        if self._zero:
            optimizer = self._engine.optimizer
            for group in optimizer.averaged_gradients:
                optimizer.averaged_gradients[group] = None
            optimizer.zero_grad(set_to_none=True)
        for parameter in self._named.values():
            parameter.grad = None

    def _allocate_sharded_state(self) -> None:
        """Allocates the sharded state before the first step, so that a checkpoint can be loaded into it."""
        for group in self._inner.param_groups:
            flat = group["params"][0]
            self._inner.state[flat] = {
                "step": torch.zeros((), device=flat.device if self._step_on_device else "cpu"),
                **{name: torch.zeros_like(flat) for name in self._state_names},
            }
        self._engine.optimizer._lazy_init_hp_params_optimizer_state()


def single_device_update(module: nn.Module, settings: OptimizerSettings) -> Callable[[], None]:
    """Returns a stage's update of these parameters without communication, to measure its time."""
    parameters = list(trainable(module))
    optimizer = _make_optimizer(parameters, settings) if parameters else None

    def update() -> None:
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if optimizer is None or not gradients:
            return
        norm = math.sqrt(float(torch.stack([_square(gradient) for gradient in gradients]).sum()))
        if settings.max_grad_norm is not None and norm > settings.max_grad_norm:
            torch._foreach_mul_(gradients, settings.max_grad_norm / norm)
        optimizer.step()

    return update


def _state_names(settings: OptimizerSettings) -> tuple[str, ...]:
    names = _STATE_NAMES.get(settings.name, ())
    return names[:1] if settings.name == "rmsprop" and settings.beta1 == 0 else names


def _state_shapes(shape: tuple[int, ...], names: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a parameter's optimizer state; without ``names``, of Adafactor's."""
    if names:
        return {**dict.fromkeys(names, shape), "step": ()}
    sums = ((*shape[:-1], 1), (*shape[:-2], 1, shape[-1])) if len(shape) > 1 else (shape,)
    return {**dict(zip(_ADAFACTOR[len(shape) > 1], sums, strict=True)), "step": ()}


def _square(gradient: Tensor) -> Tensor:
    return torch.linalg.vector_norm(gradient, dtype=torch.float64).square()


def _make_optimizer(parameters: list[nn.Parameter], settings: OptimizerSettings) -> torch.optim.Optimizer:
    if settings.name == "adafactor":
        # update clipping d = 1 is part of Adafactor (Shazeer and Stern, 2018) and independent of max_grad_norm
        return torch.optim.Adafactor(parameters, lr=settings.learning_rate, weight_decay=settings.weight_decay, d=1.0)
    if settings.name == "rmsprop":
        return torch.optim.RMSprop(
            parameters, lr=settings.learning_rate, alpha=settings.beta2, eps=settings.epsilon,
            weight_decay=settings.weight_decay, momentum=settings.beta1,
        )  # fmt: skip
    return torch.optim.AdamW(
        parameters, lr=settings.learning_rate, betas=(settings.beta1, settings.beta2), eps=settings.epsilon,
        weight_decay=settings.weight_decay, fused=True,
    )  # fmt: skip


def named_parameters(indices: Sequence[int], layers: nn.ModuleList) -> dict[tuple[int, str], nn.Parameter]:
    """Returns a stage's parameters by (layer, name), in layer order."""

    def pairs() -> Iterator[tuple[tuple[int, str], nn.Parameter]]:
        for index, layer in zip(indices, layers, strict=True):
            for name, parameter in layer.named_parameters():
                yield (index, name), parameter

    return dict(pairs())


class _DeepSpeedTopology:
    """The data-parallel and model-parallel groups in DeepSpeed's ``mpu`` interface."""

    def __init__(self, coord: RankCoord, groups: ProcessGroups) -> None:
        self._coord, self._groups = coord, groups

    def get_data_parallel_group(self) -> Group:
        return self._groups.replicas

    def get_data_parallel_rank(self) -> int:
        return self._coord.replica

    def get_data_parallel_world_size(self) -> int:
        return self._coord.replicas

    def get_model_parallel_group(self) -> Group:
        return self._groups.stages

    def get_model_parallel_rank(self) -> int:
        return self._coord.stage

    def get_model_parallel_world_size(self) -> int:
        return self._coord.stages


def _initialize(
    module: nn.Module, inner: torch.optim.Optimizer, coord: RankCoord, groups: ProcessGroups, zero_stage: int
) -> Any:
    """Returns the engine. Its own clipping and norm are off: they ignore ties, depend on K, and the norm would cost two
    all-reduces per step."""
    os.environ.update(RANK=str(coord.rank), WORLD_SIZE=str(coord.stages * coord.replicas))
    os.environ.setdefault("LOCAL_RANK", "0")
    if not torch.cuda.is_available():
        os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    deepspeed.utils.logger.setLevel(logging.ERROR)
    # otherwise DeepSpeed compiles an all-reduce kernel for inference at the first start, for half a minute
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    for parameter in module.parameters():
        parameter.model_parallel = True  # type: ignore[attr-defined]  # otherwise DeepSpeed treats stages as copies
    engine, *_ = deepspeed.initialize(
        model=module, optimizer=inner, mpu=_DeepSpeedTopology(coord, groups), dist_init_required=False,
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
    return engine
