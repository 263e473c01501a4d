"""The optimizer state of a stage: DeepSpeed's engine. In the product only this module imports deepspeed.

    ReplicatedState   each replica holds all gradients and optimizer state; no ZeRO
    ShardedState      each replica holds its 1/R of them; ZeRO-1

With R = 1 there is nothing to shard and each parameter stays a separate tensor, so results are bit-identical for all K.
ZeRO-2 and 3 are not supported: they shard gradients and weights per micro-batch, which costs a pipeline M times per
step. Three cases run without ZeRO: Adafactor, whose factored moments need whole matrices, which ZeRO flattens; SGD
without momentum, which has no state; and parameters that are not fp32, whose gradients ZeRO loses.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn

from suite.device import is_host
from suite.pipeline.model.topology import ProcessGroups, RankCoord
from suite.pipeline.runtime.gradient_reducer import Shards
from suite.settings import OptimizerSettings
from suite.training.update_rule import Key, make_optimizer, param_groups, state_shapes

State = dict[str, Tensor]


class ReplicatedState:
    """Whole gradients and optimizer state on every replica. All replicas must make the same calls in the same order."""

    is_sharded = False

    def __init__(
        self,
        module: nn.Module,
        parameters: Mapping[Key, nn.Parameter],
        settings: OptimizerSettings,
        coord: RankCoord,
        groups: ProcessGroups,
        device: torch.device,
        factors: Mapping[Key, tuple[float, float]],
    ) -> None:
        """``parameters`` are the trainable ones of ``module``, with the ``factors`` of their learning rate and weight
        decay. Without any there is no DeepSpeed engine."""
        self._parameters, self._settings = parameters, settings
        self._step_on_device = settings.name == "adamw"  # the fused kernel needs it there, Adafactor on the host
        if parameters:
            self._inner = make_optimizer(param_groups(parameters, factors, settings), settings)
            self._engine = _initialize(module, self._inner, coord, groups, device, int(self.is_sharded))
            self._allocate_state()

    def _allocate_state(self) -> None:
        """Allocates what a checkpoint must be able to fill before the first step."""

    def step(self, rate: float) -> None:
        if not self._parameters:
            return
        for group in self._inner.param_groups:
            group["lr"] = rate * group["lr_factor"]
        self._engine.optimizer.step()
        assert not getattr(self._engine.optimizer, "overflow", False), "DeepSpeed skipped a step that was agreed on"

    def shards(self) -> Shards | None:
        """Returns the shard of each replica; None if each has all gradients."""
        return None

    def local_gradients(self) -> list[tuple[Key, Tensor]]:
        """Returns this replica's part of each summed gradient: all of it, or its shard."""
        return [(key, cast(Tensor, parameter.grad)) for key, parameter in self._parameters.items()]

    def gradient(self, key: Key) -> Tensor:
        """Returns the full summed gradient of a parameter."""
        return cast(Tensor, self._parameters[key].grad)

    def state(self, key: Key) -> State:
        """Returns the full optimizer state of a parameter; empty before the first step."""
        state = self._inner.state.get(self._parameters[key], {})
        return {name: value for name, value in state.items() if value is not None}

    def load_state(self, key: Key, state: State) -> None:
        parameter = self._parameters[key]
        self._inner.state[parameter] = {
            name: value.to("cpu" if name == "step" and not self._step_on_device else parameter.device)
            for name, value in state.items()
        }

    def accept_values(self, parameters: Sequence[nn.Parameter]) -> None:
        """Makes values that were written to parameters outside of ``step`` those that the next step updates."""

    def clear_gradients(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None


class ShardedState(ReplicatedState):
    """A shard of the summed gradients and of the optimizer state, as ZeRO-1 divides them. DeepSpeed has nothing of a
    parameter without values."""

    is_sharded = True

    def _allocate_state(self) -> None:
        from deepspeed import utils

        self._utils: Any = utils
        self._names = self._settings.state_names
        for group in self._inner.param_groups:
            flat = group["params"][0]
            self._inner.state[flat] = {
                "step": torch.zeros((), device=flat.device if self._step_on_device else "cpu"),
                **{name: torch.zeros_like(flat) for name in self._names},
            }
        self._engine.optimizer._lazy_init_hp_params_optimizer_state()

    def shards(self) -> Shards:
        optimizer, places = self._engine.optimizer, {}
        groups, offsets_of_groups = optimizer.round_robin_bit16_groups, optimizer.round_robin_bit16_offsets
        for parameters, offsets, size in zip(groups, offsets_of_groups, optimizer.partition_size, strict=True):
            places.update({id(p): (offset, size) for p, offset in zip(parameters, offsets, strict=True)})
        return Shards(places)

    def local_gradients(self) -> list[tuple[Key, Tensor]]:
        optimizer = self._engine.optimizer
        optimizer.set_gradient_accumulation_boundary(True)
        # the second half of DeepSpeed's reduce_gradients: each replica takes its shard of the gradients, which are
        # summed already; nothing is reduced here
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
        parameter = self._parameters[key]
        return cast(Tensor, self._utils.safe_get_full_grad(parameter)) if parameter.numel() else parameter.detach()

    def state(self, key: Key) -> State:
        parameter = self._parameters[key]
        get = self._utils.safe_get_full_optimizer_state
        state = {name: get(parameter, name) if parameter.numel() else parameter.detach() for name in self._names}
        expected = state_shapes(tuple(parameter.shape), self._settings)
        return {**state, "step": self._step_counts[0].clone()} if "step" in expected else state

    def load_state(self, key: Key, state: State) -> None:
        parameter = self._parameters[key]
        for name in self._names if parameter.numel() else ():
            self._utils.safe_set_full_optimizer_state(parameter, state[name].to(parameter.device), name)
        for count in self._step_counts if "step" in state else ():
            count.copy_(state["step"])

    def accept_values(self, parameters: Sequence[nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter.numel():
                self._utils.safe_set_full_fp32_param(parameter, parameter.data)

    def clear_gradients(self) -> None:
        optimizer = self._engine.optimizer
        for group in optimizer.averaged_gradients:
            optimizer.averaged_gradients[group] = None
        optimizer.zero_grad(set_to_none=True)
        super().clear_gradients()

    @property
    def _step_counts(self) -> list[Tensor]:
        """Each group's count of steps; all are equal."""
        return [self._inner.state[group["params"][0]]["step"] for group in self._inner.param_groups]


def keep_on_the_host() -> None:
    """Keeps DeepSpeed from moving a model to this machine's GPU, for which it may have been imported."""
    from deepspeed.accelerator import set_accelerator
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    set_accelerator(CPU_Accelerator())


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

    # Destructors of ZeRO import it. If the garbage collector calls them amid another import, that one can fail with a
    # KeyError (CPython issue 91351); a module that is loaded already does no harm.
    import deepspeed.utils.pin_memory

    if is_host(device):
        keep_on_the_host()
    deepspeed.utils.logger.setLevel(logging.ERROR)
    # otherwise each worker runs a compiler to see which operators DeepSpeed could build, and the first one builds an
    # all-reduce for inference, for half a minute
    deepspeed.ops.__compatible_ops__ = {}
    for parameter in module.parameters():
        parameter.model_parallel = True  # type: ignore[attr-defined]  # otherwise DeepSpeed treats stages as copies
    mpu = SimpleNamespace(
        get_data_parallel_group=lambda: groups.data_parallel,
        get_data_parallel_rank=lambda: coord.replica,
        get_data_parallel_world_size=lambda: coord.replicas,
        get_model_parallel_group=lambda: groups.pipeline,
        get_model_parallel_rank=lambda: coord.stage,
        get_model_parallel_world_size=lambda: coord.stages,
    )
    engine, *_ = deepspeed.initialize(
        model=module,
        optimizer=inner,
        mpu=mpu,
        dist_init_required=False,
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "zero_optimization": {
                "stage": zero_stage,
                "overlap_comm": False,
                "contiguous_gradients": False,
                "compute_grad_norm": not zero_stage,  # not a valid option without ZeRO
            },
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 0.0,
        },
    )
    assert engine.device == device, f"DeepSpeed moved the stage from {device} to {engine.device}"
    return engine
