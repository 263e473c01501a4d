"""The update: one DeepSpeed engine a stage over the replicas of that stage. The only file that imports deepspeed.

    .grad of R replicas --mean over replicas, begun in the last backward--> each replica's share (DeepSpeed)
    --per-layer squares, one small all-reduce over all workers--> global norm, losses, finite flag
    --same decision everywhere--> clip and step (DeepSpeed), or skip

With R = 1 DeepSpeed runs without ZeRO and each parameter stays a tensor of its own, so a result does not depend on K by
so much as a bit. With R > 1 it is ZeRO-1: each replica keeps 1/R of the optimizer state. ZeRO-2 and 3 shard gradients
and weights per micro-batch, which a pipeline would pay for M times a step; they are not offered. Adafactor's factored
moments need whole matrices, which ZeRO flattens, so Adafactor always runs without ZeRO.

Frozen parameters (``requires_grad`` False) have no part in any of it: no gradient, state, norm or weight decay. A stage
of frozen parameters alone has no DeepSpeed engine; it takes part in the all-reduce of the norm like all others.
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
from suite.pipeline.batchnorm import MovingAverages
from suite.pipeline.layers import trainable
from suite.pipeline.recorder import Recorder
from suite.pipeline.reduction import Reduction
from suite.pipeline.step import Sums
from suite.pipeline.ties import Ties
from suite.pipeline.topology import Group, Groups, Place
from suite.settings import OptimizerSettings
from suite.training.learning_rate import learning_rate

State = dict[str, Tensor]

_KEPT: dict[str, tuple[str, ...]] = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "rmsprop": ("square_avg", "momentum_buffer"),
}
"""What an optimizer keeps for each value, beside its count of steps; ZeRO shares it out. RMSProp without momentum keeps
the first alone."""
_ADAFACTOR = {True: ("row_var", "col_var"), False: ("variance",)}  # by whether it is a matrix


@dataclass(frozen=True)
class Outcome:
    """What all workers know after a step: losses summed over the mini-batch, the gradient norm, what was done."""

    objective: float
    measure: float
    norm: float
    rate: float
    applied: bool
    norms: tuple[float, ...] = ()
    """Of each layer's gradient."""

    @property
    def culprits(self) -> tuple[int, ...]:
        """Layers with non-finite gradients, in order."""
        return tuple(layer for layer, norm in enumerate(self.norms) if not math.isfinite(norm))


class StageOptimizer:
    """Updates one stage's parameters together with all other stages, or none of them."""

    def __init__(
        self, module: nn.Module, named: dict[tuple[int, str], nn.Parameter], layers: int, ties: Ties,
        place: Place, groups: Groups, device: torch.device, settings: OptimizerSettings,
        averages: MovingAverages | None = None, averages_over_replicas: bool = True,
    ) -> None:  # fmt: skip
        """``named`` are the stage's parameters by (layer, name), ``layers`` counts the whole model's. ``averages`` are
        those of the stage's norms: they move when, and only when, the parameters do."""
        self._named = {key: parameter for key, parameter in named.items() if parameter.requires_grad}
        self._layers, self._ties = layers, ties
        self._place, self._device, self._settings = place, device, settings
        self._averages = averages
        self.reduction = (
            Reduction(list(self._named.values()), ties.parameters(), groups.replicas) if place.replicas > 1 else None
        )
        """For the executor, which knows when a step's gradients are whole."""
        self._averaged_over = groups.replicas if place.replicas > 1 and averages_over_replicas else None
        self._kept = _kept(settings)
        self._zero = place.replicas > 1 and bool(self._kept) and bool(self._named)
        self._step_on_device = settings.name == "adamw"  # the fused kernel wants it there, Adafactor on the host
        if not self._named:
            return
        self._inner = _make_optimizer(list(self._named.values()), settings)
        self._engine = _initialize(module, self._inner, place, groups, zero_stage=1 if self._zero else 0)
        if self._zero:
            self._allocate_sharded_state()

    def update(self, sums: Sums, step: int, recorder: Recorder | None = None) -> Outcome:
        """Reduces gradients over ties and replicas, agrees on norm and finiteness, and steps or skips.

        ``sums`` is this worker's share of the losses. Gradients are cleared in either case. ``recorder`` notes the
        part after the agreement: until then a worker may wait for others.
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
            if self._place.replicas > 1:
                self._equalise()
        if self._averages is not None:
            self._averages.close(applied, self._averaged_over)
        self.clear()
        if recorder is not None:
            recorder.note("U", -1, start)
        norms = tuple(math.sqrt(square) if math.isfinite(square) else square for square in squares)
        return Outcome(totals[0], totals[1], norm, rate, applied, norms)

    def _step(self, rate: float) -> None:
        for group in self._inner.param_groups:
            group["lr"] = rate
        self._engine.optimizer.step()
        assert not getattr(self._engine.optimizer, "overflow", False), "DeepSpeed skipped a step that was agreed on"

    def reduce(self) -> list[tuple[tuple[int, str], Tensor]]:
        """Sums gradients over ties and averages them over replicas: what an update begins with.

        Returns what this worker then holds of each parameter's: the whole, or its ZeRO shard.
        """
        if self.reduction is not None:
            self.reduction.send_rest()  # a sum over ties waits for the slowest stage that has a copy
        for parameter in self._named.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self._ties.sum_gradients()
        if self.reduction is not None:
            self.reduction.finish()
        return self._held()

    def gradient(self, key: tuple[int, str]) -> Tensor:
        """Returns the whole gradient of one parameter that is not frozen, after ``reduce``. With replicas, all of them
        must call it in the same order."""
        parameter = self._named[key]
        if not self._zero:
            return cast(Tensor, parameter.grad)
        from deepspeed.utils import safe_get_full_grad

        return cast(Tensor, safe_get_full_grad(parameter))

    def state(self, key: tuple[int, str]) -> State:
        """Returns the whole optimizer state of one parameter, empty of a frozen one. With replicas, all of them must
        call it in the same order."""
        if key not in self._named:
            return {}
        parameter = self._named[key]
        if not self._zero:
            return {name: value for name, value in self._inner.state.get(parameter, {}).items() if value is not None}
        from deepspeed.utils import safe_get_full_optimizer_state

        flat = self._inner.state[self._inner.param_groups[0]["params"][0]]
        state = {name: cast(Tensor, safe_get_full_optimizer_state(parameter, name)) for name in self._kept}
        return {"step": flat["step"].clone(), **state}

    def load_state(self, key: tuple[int, str], state: State) -> None:
        """Sets the whole optimizer state of one parameter that is not frozen, whatever K, R and ZeRO stage it was saved
        from.

        Raises CheckpointError when it is another optimizer's.
        """
        parameter = self._named[key]
        expected = _state_shapes(tuple(parameter.shape), self._kept)
        if {name: (tuple(value.shape), value.dtype) for name, value in state.items()} != {
            name: (shape, torch.float32) for name, shape in expected.items()
        }:
            found = {name: tuple(value.shape) for name, value in sorted(state.items())}
            raise CheckpointError(
                f"the optimizer state of layer {key[0]}, {key[1]} is {found}, {self._settings.name} keeps "
                f"{expected} in fp32; resume with the optimizer of the run that wrote it"
            )
        if not self._zero:
            self._inner.state[parameter] = {
                name: value.to("cpu" if name == "step" and not self._step_on_device else self._device)
                for name, value in state.items()
            }
            return
        from deepspeed.utils import safe_set_full_optimizer_state

        for name in self._kept:
            safe_set_full_optimizer_state(parameter, state[name].to(self._device), name)
        self._inner.state[self._inner.param_groups[0]["params"][0]]["step"].copy_(state["step"])

    def _held(self) -> list[tuple[tuple[int, str], Tensor]]:
        """Returns what this worker holds of each averaged gradient: the whole, or its ZeRO shard."""
        if not self._zero:
            return [(key, cast(Tensor, parameter.grad)) for key, parameter in self._named.items()]
        optimizer = self._engine.optimizer
        optimizer.set_gradient_accumulation_boundary(True)
        # the second half of DeepSpeed's reduce_gradients: of gradients that are means already, each takes its share
        optimizer.overlapping_partition_gradients_reduce_epilogue()
        keys = {id(parameter): key for key, parameter in self._named.items()}
        held = []
        for group, parameters in enumerate(optimizer.params_in_partition):
            shards = [g for g in optimizer.averaged_gradients[group] if not getattr(g, "_zero_padding", False)]
            shards = shards[: len(parameters)]  # behind them only padding
            values = sum(map(Tensor.numel, shards))
            wanted = optimizer.partition_size[group] - optimizer.groups_padding[group]
            assert values == wanted, f"DeepSpeed gave shards of {values} values, this replica has {wanted}"
            held += [(keys[id(p)], shard) for p, shard in zip(parameters, shards, strict=True)]
        return held

    @torch.no_grad()
    def _agree(self, reduced: Sequence[tuple[tuple[int, str], Tensor]], sums: Sums) -> tuple[list[float], list[float]]:
        """One all-reduce over all workers: the gradient's square sum of each layer, and the losses' sums.

        Each layer's entry is filled by the workers that hold the layer and zero elsewhere, so adding them is exact and
        the total, made in layer order, has the same bits at every K.
        """
        squares: list[list[Tensor]] = [[] for _ in range(self._layers)]
        counts = self._zero or self._place.replica == 0  # without ZeRO every replica holds the same mean
        for (layer, name), gradient in reduced if counts else ():
            if self._ties.owned(layer, name):
                squares[layer].append(_square(gradient))
        zero = torch.zeros((), dtype=torch.float64, device=self._device)
        vector = torch.stack(
            [torch.stack(parts).sum() if parts else zero for parts in squares]
            + [zero + sums.objective, zero + sums.measure]
        )
        dist.all_reduce(vector)
        values = vector.tolist()
        return values[: self._layers], values[self._layers :]

    @torch.no_grad()
    def _clip(self, reduced: Sequence[tuple[tuple[int, str], Tensor]], norm: float) -> None:
        bound = self._settings.clip_norm
        if bound is not None and norm > bound and reduced:  # torch refuses an empty list
            torch._foreach_mul_([gradient for _, gradient in reduced], bound / norm)

    @torch.no_grad()
    def _equalise(self) -> None:
        """Gives the copies of tied parameters the owner's values again.

        A sum over three or more replicas rounds in an order that depends on where in DeepSpeed's buffer a gradient
        lies, so copies would drift apart by the last bit.
        """
        self._ties.equalise()
        if self._zero:
            from deepspeed.utils import safe_set_full_fp32_param

            for parameter in self._ties.parameters():
                safe_set_full_fp32_param(parameter, parameter.data)

    def forget(self) -> None:
        """Drops what a mini-batch left that is not to be applied: gradients, and batch statistics.

        All replicas must call it: some gradients have left for the others already.
        """
        if self.reduction is not None:
            self.reduction.finish()
        if self._averages is not None:
            self._averages.close(False, self._averaged_over)
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
        """Makes the sharded state before the first step, so that a checkpoint can be read into it."""
        for group in self._inner.param_groups:
            flat = group["params"][0]
            self._inner.state[flat] = {
                "step": torch.zeros((), device=flat.device if self._step_on_device else "cpu"),
                **{name: torch.zeros_like(flat) for name in self._kept},
            }
        self._engine.optimizer._lazy_init_hp_params_optimizer_state()


def lone_update(module: nn.Module, settings: OptimizerSettings) -> Callable[[], None]:
    """Returns what a stage does to update these parameters, but for the exchange with other workers: to measure it."""
    parameters = list(trainable(module))
    optimizer = _make_optimizer(parameters, settings) if parameters else None

    def update() -> None:
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if optimizer is None or not gradients:
            return
        norm = math.sqrt(float(torch.stack([_square(gradient) for gradient in gradients]).sum()))
        if settings.clip_norm is not None and norm > settings.clip_norm:
            torch._foreach_mul_(gradients, settings.clip_norm / norm)
        optimizer.step()

    return update


def _kept(settings: OptimizerSettings) -> tuple[str, ...]:
    kept = _KEPT.get(settings.name, ())
    return kept[:1] if settings.name == "rmsprop" and settings.beta1 == 0 else kept


def _state_shapes(shape: tuple[int, ...], kept: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    """Returns what is kept of a parameter: tensors of its shape, or what Adafactor makes of it."""
    if kept:
        return {**dict.fromkeys(kept, shape), "step": ()}
    sums = ((*shape[:-1], 1), (*shape[:-2], 1, shape[-1])) if len(shape) > 1 else (shape,)
    return {**dict(zip(_ADAFACTOR[len(shape) > 1], sums, strict=True)), "step": ()}


def _square(gradient: Tensor) -> Tensor:
    return torch.linalg.vector_norm(gradient, dtype=torch.float64).square()


def _make_optimizer(parameters: list[nn.Parameter], settings: OptimizerSettings) -> torch.optim.Optimizer:
    if settings.name == "adafactor":
        # update clipping d = 1 is part of Adafactor (Shazeer and Stern, 2018) and apart from the norm bound
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


class _Grid:
    """How DeepSpeed asks who shares parameters (data parallel) and who shares the model (model parallel)."""

    def __init__(self, place: Place, groups: Groups) -> None:
        self._place, self._groups = place, groups

    def get_data_parallel_group(self) -> Group:
        return self._groups.replicas

    def get_data_parallel_rank(self) -> int:
        return self._place.replica

    def get_data_parallel_world_size(self) -> int:
        return self._place.replicas

    def get_model_parallel_group(self) -> Group:
        return self._groups.stages

    def get_model_parallel_rank(self) -> int:
        return self._place.stage

    def get_model_parallel_world_size(self) -> int:
        return self._place.stages


def _initialize(module: nn.Module, inner: torch.optim.Optimizer, place: Place, groups: Groups, zero_stage: int) -> Any:
    """Returns the engine. Its own clipping and norm stay off: they know nothing of ties and depend on K, and the norm
    would cost two all-reduces a step."""
    os.environ.update(RANK=str(place.rank), WORLD_SIZE=str(place.stages * place.replicas))
    os.environ.setdefault("LOCAL_RANK", "0")
    if not torch.cuda.is_available():
        os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    deepspeed.utils.logger.setLevel(logging.ERROR)
    # a kernel for inference all-reduces that DeepSpeed would compile for half a minute at the first start
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    for parameter in module.parameters():
        parameter.model_parallel = True  # type: ignore[attr-defined]  # otherwise DeepSpeed takes stages for copies
    engine, *_ = deepspeed.initialize(
        model=module, optimizer=inner, mpu=_Grid(place, groups), dist_init_required=False,
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "zero_optimization": {
                "stage": zero_stage, "overlap_comm": False, "contiguous_gradients": False,
                "compute_grad_norm": not zero_stage,  # without ZeRO it computes none and refuses the word
            },
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 0.0,
        },
    )  # fmt: skip
    return engine


def named_parameters(indices: Sequence[int], layers: nn.ModuleList) -> dict[tuple[int, str], nn.Parameter]:
    """Returns a stage's parameters by (layer, name), in layer order."""

    def pairs() -> Iterator[tuple[tuple[int, str], nn.Parameter]]:
        for index, layer in zip(indices, layers, strict=True):
            for name, parameter in layer.named_parameters():
                yield (index, name), parameter

    return dict(pairs())
