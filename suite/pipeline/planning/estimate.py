"""Estimates the cost of each layer on a declared device, from a run on fake tensors.

Each distinct layer runs once, with ``OperatorRecorder`` in place of a clock and an allocator. Under ``FakeTensorMode``
an operator computes only shapes, those of the CPU's kernels, fused attention included. So a layer of any size takes
milliseconds, forward and backward, and needs no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from suite.device import fused_by
from suite.pipeline.model.batchnorm import recorded_bytes
from suite.pipeline.model.layers import Tensors, as_tuple, frozen_values, loss_of, trainable
from suite.pipeline.planning.costs import LayerCost, cut_costs
from suite.pipeline.planning.devices import Device
from suite.pipeline.planning.flops import op_flops
from suite.pipeline.planning.memory_tracker import MemoryUse
from suite.pipeline.planning.sample import MicroBatch
from suite.pipeline.runtime.boundary import Boundary, CutSpec, TensorSpec, to_bf16
from suite.pipeline.runtime.shape_inference import ShapeInference, fake_copy, first_equals, inputs_of
from suite.pipeline.runtime.skip import find_skips
from suite.pipeline.runtime.weight_grad import WeightGradStore, with_deferrable_linears
from suite.settings import OptimizerSettings

_UPDATE_TRAFFIC = {"adamw": 32, "adafactor": 96, "rmsprop": 32, "sgd": 24}
"""Bytes of memory traffic for each parameter in norm and update: weight, gradient and moments read, weight and moments
written; RMSProp has a momentum instead of a mean, SGD nothing else. Adafactor (``suite.training.adafactor``) has no
moments of this size, but passes over a matrix many times: both norms read 8; for the sums of rows and of columns,
gradients squared 2 x 8 and added by halves 2 x 12; roots written 4 and bounded 8, gradients divided by them 12, the
update's norm 4, scaled 8, added 12."""

_UPDATE_BYTES = {"adamw": 8, "adafactor": 8, "rmsprop": 12, "sgd": 8}
"""Temporary bytes for each parameter of the largest tensor: its squares in fp64 for the norm; RMSProp's update too.
Adafactor's squares and update, 4 one after the other, are no more than the norm's. The batches of its smaller tensors
are those of a stage and not of a layer: ``experiments.planning.problem`` adds them."""


class CudaAutocast(TorchFunctionMode):
    """Under the CPU's autocast, computes LayerNorm in fp32 as on CUDA devices: the backward then keeps an fp32 copy of
    its input. Autocast of CPUs leaves it in bf16. https://docs.pytorch.org/docs/stable/amp.html has both lists."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.layer_norm and torch.is_autocast_enabled("cpu"):
            args = (args[0].float(), *args[1:])
        return func(*args, **kwargs or {})


class CudaDropout(TorchFunctionMode):
    """Drops values as CUDA devices do, with a mask of one byte a value. The CPU's mask is as wide as the values: plans
    for declared devices count that."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return (_byte_dropout if func is F.dropout else func)(*args, **kwargs or {})


def _byte_dropout(values: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return torch.native_dropout(values, p, training)[0] if training and p else values


def estimate(
    layers: Sequence[nn.Module], loss: nn.Module, data: MicroBatch, device: Device, optimizer: OptimizerSettings
) -> list[LayerCost]:
    """Returns the estimated cost of each of the meta-device ``layers``; the last one includes the loss."""
    return estimate_on([device], layers, loss, data, optimizer)[0]


def estimate_on(
    devices: Sequence[Device],
    layers: Sequence[nn.Module],
    loss: nn.Module,
    data: MicroBatch,
    optimizer: OptimizerSettings,
) -> list[list[LayerCost]]:
    """Returns the costs on each of some devices, all of them CUDA devices or none."""
    skips = find_skips(layers)
    cuts = ShapeInference(layers, optimizer.precision == "bf16").infer_all(CutSpec.of(data.inputs))
    targets = tuple(map(TensorSpec.of, data.targets))
    found: dict[int, list[dict[str, Any]]] = {}
    costs: list[list[LayerCost]] = [[] for _ in devices]
    for index, first in enumerate(first_equals(layers, cuts)):
        if first == index:
            boundary, own_loss = inputs_of(layers[index], cuts[index]), loss if index == len(layers) - 1 else None
            with fake_copy(layers[index]) as own, CudaAutocast() if devices[0].is_cuda else nullcontext():
                found[index] = _estimate(own, own_loss, boundary, targets, devices, optimizer)
        for of_device, own_cost in zip(costs, found[first], strict=True):
            of_device.append(LayerCost(**own_cost, **cut_costs(cuts, skips, index)))
    return costs


def _estimate(
    layer: nn.Module,
    loss: nn.Module | None,
    boundary: Boundary,
    target_specs: Boundary,
    devices: Sequence[Device],
    optimizer: OptimizerSettings,
) -> list[dict[str, Any]]:
    """Runs one layer without graph, with graph, backward, and with a split backward."""
    for parameter in trainable(layer):  # beforehand, so that the backward's peak includes only temporary tensors
        parameter.grad = torch.empty_like(parameter)
    host, is_bf16 = torch.device("cpu"), optimizer.precision == "bf16"
    inputs = tuple(spec.empty(host).requires_grad_(spec.needs_gradient) for spec in boundary)
    targets = tuple(spec.empty(host) for spec in target_specs)
    recorder = OperatorRecorder()
    fuses = fused_by(recorder.run_fused) if devices[0].is_cuda else nullcontext()

    def run() -> Tensors:
        with torch.autocast("cpu", torch.bfloat16, enabled=is_bf16):
            if loss is not None:
                return loss_of(layer, loss, inputs, targets)[:1]
            outputs = _distinct(layer(*inputs))
        return to_bf16(outputs) if is_bf16 else outputs

    with recorder, fuses, torch.autocast("cpu", enabled=False):  # as Stage.weights_cast_once
        with torch.no_grad(), recorder.phase() as first_forward:
            run()
        with torch.no_grad(), recorder.phase() as forward:
            run()
        with recorder.phase() as graph:
            outputs = run()
        starts, gradients = _backward(outputs)
        with recorder.phase() as backward:
            torch.autograd.backward(starts, gradients)
        weight, deferred_bytes = _deferred(layer, inputs, run, recorder)
    values, frozen = [parameter.numel() for parameter in trainable(layer)], frozen_values(layer)
    sizes = {
        "update_peak_bytes": _UPDATE_BYTES[optimizer.name] * max(values, default=0),
        "parameters": sum(values) + frozen,
        "frozen": frozen,
        "forward_flops": graph.flops,
        "backward_flops": backward.flops,
        "activation_bytes": max(0, graph.change),
        "forward_peak_bytes": forward.peak,
        "graph_peak_bytes": graph.peak,
        "backward_peak_bytes": backward.peak,
        "cast_bytes": first_forward.change,
        "recorded_bytes": recorded_bytes(layer),
        "deferred_bytes": deferred_bytes,
    }
    phases = {"forward_s": forward, "recompute_s": graph, "backward_s": backward, "weight_grad_s": weight}
    update_bytes = _UPDATE_TRAFFIC[optimizer.name] * sum(values)
    return [sizes | _seconds_on(device, optimizer.precision, phases, update_bytes) for device in devices]


def _seconds_on(device: Device, precision: str, phases: dict[str, Phase], update_bytes: int) -> dict[str, float]:
    """Returns the seconds of a layer's phases and of its update, which reads and writes ``update_bytes``."""
    found = {name: phase.seconds(device, precision) for name, phase in phases.items()}
    weight_grad_s = min(found["weight_grad_s"], found["backward_s"])
    return found | {"weight_grad_s": weight_grad_s, "update_s": update_bytes / device.bandwidth}


def _deferred(
    layer: nn.Module, inputs: Tensors, run: Callable[[], Tensors], recorder: OperatorRecorder
) -> tuple[Phase, int]:
    """Returns the phase of deferrable weight gradients, and the bytes held until then."""
    weight_grads = WeightGradStore(with_deferrable_linears(layer))
    if not weight_grads.modules:
        return Phase(), 0
    for tensor in inputs:
        tensor.grad = None
    with recorder.phase() as first_part:
        deferred = weight_grads.run_deferred(partial(torch.autograd.backward, *_backward(run())))
        for tensor in inputs:
            tensor.grad = None
    with recorder.phase() as second_part:
        for grad in deferred:
            grad.add()
    return second_part, max(0, first_part.change)


def _distinct(results: Tensor | Tensors) -> Tensors:
    """Returns each tensor once: an output may also be a skip."""
    return tuple({id(tensor): tensor for tensor in as_tuple(results)}.values())


def _backward(outputs: Tensors) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the outputs that require gradients, and gradients for them."""
    differentiable = [output for output in outputs if output.requires_grad]
    return differentiable, [torch.empty_like(output) for output in differentiable]


class Operator(NamedTuple):
    """The work of one operator."""

    model_flops: int
    """``suite.pipeline.planning.flops``."""
    hardware_flops: int
    traffic_bytes: int
    """Its inputs and outputs."""
    starts_kernel: bool


@dataclass
class Phase(MemoryUse):
    """The operators in a context of ``OperatorRecorder.phase``, and their memory; known at its end."""

    operators: Sequence[Operator] = ()

    @property
    def flops(self) -> int:
        """Model operations."""
        return sum(operator.model_flops for operator in self.operators)

    def seconds(self, device: Device, precision: str) -> float:
        """Returns the seconds of the slower of a device and its host. The device sums over operators the slower of two:
        matrix products at its rate, or tensors at its bandwidth. The host starts one operator after the other."""
        rate = device.product_rate(precision)
        device_s = sum(
            max(each.hardware_flops / rate, each.traffic_bytes / device.bandwidth) for each in self.operators
        )
        return max(device_s, device.launch_s * sum(each.starts_kernel for each in self.operators))


class OperatorRecorder(TorchDispatchMode):
    """A mode that records operators since ``settle``, and ``alive`` and ``peak``: bytes of the tensors created under
    the mode that are alive now, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.operators: list[Operator] = []
        self.alive = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        inputs, outputs = _tensors((args, kwargs)), _tensors(out)
        before = {_storage(tensor) for tensor in inputs}
        made = [tensor for tensor in outputs if _storage(tensor) not in before]
        if made or (outputs and func._schema.is_mutable):  # others return views
            self._record(func, (*inputs, *outputs), args, kwargs, out)
        for tensor in made:
            storage = tensor.untyped_storage()
            self._live[_storage(tensor)] = StorageWeakRef(storage), storage.nbytes()
        if outputs:
            self._count_alive()
        return out

    def run_fused(self, function: Callable[..., Any], *args: Any, **constants: Any) -> Any:
        """Runs a function whose operators are one kernel: what they pass on to each other takes no memory. The host
        takes as long as for the operators."""
        count, peak = len(self.operators), self.peak
        out = function(*args, **constants)
        traffic_bytes = sum(tensor.nbytes for tensor in _tensors((args, constants, out)))
        starts = [Operator(0, 0, 0, operator.starts_kernel) for operator in self.operators[count:]]
        self.operators[count:] = [Operator(0, 0, traffic_bytes, False), *starts]
        self._count_alive()
        self.peak = max(peak, self.alive)
        return out

    def settle(self) -> None:
        """Removes freed tensors, and resets the peak and the operators."""
        self.peak, self.operators = 0, []
        self._count_alive()

    @contextmanager
    def phase(self) -> Iterator[Phase]:
        """A context that counts from its start, where it settles."""
        self.settle()
        start, phase = self.alive, Phase()
        yield phase
        phase.operators, phase.peak = self.operators, self.peak - start
        self.settle()
        phase.change = self.alive - start

    def _record(self, func: Any, tensors: Iterable[Tensor], args: Any, kwargs: Any, out: Any) -> None:
        is_empty = func.__name__.startswith("empty")  # these start no kernel
        traffic_bytes = sum(tensor.nbytes for tensor in tensors)
        self.operators.append(Operator(*op_flops(func, args, kwargs, out), traffic_bytes, not is_empty))

    def _count_alive(self) -> None:
        self._live = {key: entry for key, entry in self._live.items() if not entry[0].expired()}
        self.alive = sum(size for _, size in self._live.values())
        self.peak = max(self.peak, self.alive)


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
