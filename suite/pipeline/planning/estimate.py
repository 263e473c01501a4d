"""Estimates the cost of each layer on a declared device, from a run on fake tensors.

It runs layer by layer as ``suite.pipeline.planning.profile`` does, equal layers once, with ``OpCostMode`` instead of a
clock and an allocator. Under ``FakeTensorMode`` an operator computes only shapes, those of the CPU's kernels, fused
attention included. So a layer of any size takes milliseconds, forward and backward, and needs no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from suite.pipeline.model.batchnorm import recorded_bytes
from suite.pipeline.model.layers import Tensors, as_tuple, frozen_values, loss_of, trainable
from suite.pipeline.planning.costs import LayerCost, cut_costs
from suite.pipeline.planning.devices import Device
from suite.pipeline.planning.flops import op_flops
from suite.pipeline.planning.profile import MicroBatch
from suite.pipeline.runtime.boundary import Boundary, CutSpec, TensorSpec, to_bf16
from suite.pipeline.runtime.shape_inference import ShapeInference, fake_copy, run_distinct
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
are those of a stage and not of a layer: ``experiments.planning.model_facts`` adds them."""


class CudaAutocast(TorchFunctionMode):
    """Under the CPU's autocast, computes LayerNorm in fp32 as on CUDA devices: the backward then keeps an fp32 copy of
    its input. Autocast of CPUs leaves it in bf16. https://docs.pytorch.org/docs/stable/amp.html has both lists."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.layer_norm and torch.is_autocast_enabled("cpu"):
            args = (args[0].float(), *args[1:])
        return func(*args, **kwargs or {})


def estimate(
    layers: Sequence[nn.Module], loss: nn.Module, data: MicroBatch, device: Device, optimizer: OptimizerSettings
) -> list[LayerCost]:
    """Returns the estimated cost of each of the meta-device ``layers``; the last one includes the loss."""
    skips = find_skips(layers)
    cuts = ShapeInference(layers, optimizer.precision == "bf16").infer_all(CutSpec.of(data.inputs))
    targets = tuple(map(TensorSpec.of, data.targets))

    def numbers(layer: nn.Module, boundary: Boundary, is_last: bool) -> dict[str, Any]:
        with fake_copy(layer) as own, CudaAutocast() if device.is_cuda else nullcontext():
            return _estimate(own, boundary, (loss, targets) if is_last else None, device, optimizer)

    found = enumerate(run_distinct(layers, cuts, numbers))
    return [LayerCost(**of_layer, **cut_costs(cuts, skips, index)) for index, of_layer in found]


def _estimate(
    layer: nn.Module, input_boundary: Boundary, loss_and_targets: tuple[nn.Module, Boundary] | None, device: Device,
    optimizer: OptimizerSettings,
) -> dict[str, Any]:  # fmt: skip
    """Runs one layer without graph, with graph, backward, and with a split backward."""
    for parameter in trainable(layer):  # beforehand, so that the backward's peak includes only temporary tensors
        parameter.grad = torch.empty_like(parameter)
    host = torch.device("cpu")
    inputs = tuple(spec.empty(host).requires_grad_(spec.needs_gradient) for spec in input_boundary)
    targets = () if loss_and_targets is None else tuple(spec.empty(host) for spec in loss_and_targets[1])
    is_bf16 = optimizer.precision == "bf16"
    op_cost = OpCostMode(device.product_rate(optimizer.precision), device.bandwidth, device.launch_s)

    def run() -> Tensors:
        with torch.autocast("cpu", torch.bfloat16, enabled=is_bf16):
            if loss_and_targets is not None:
                return (loss_of(layer, loss_and_targets[0], inputs, targets)[0],)
            outputs = _distinct(layer(*inputs))
        return to_bf16(outputs) if is_bf16 else outputs

    with op_cost, torch.autocast("cpu", enabled=False):  # as Stage.weights_cast_once
        with torch.no_grad():
            run()
        op_cost.settle()
        casts = op_cost.alive
        with torch.no_grad():
            run()
        forward_s, forward_peak = op_cost.seconds, op_cost.peak - casts
        op_cost.settle()
        outputs = run()
        recompute_s, graph_peak = op_cost.seconds, op_cost.peak - casts
        op_cost.settle()
        activations = max(0, op_cost.alive - casts)
        before, gradients = _backward(outputs)
        op_cost.settle()
        base = op_cost.alive
        torch.autograd.backward(before, gradients)
        backward_s = op_cost.seconds
        backward_peak = max(0, op_cost.peak - base)
        weight_s, deferred_bytes = _deferred(layer, inputs, run, op_cost)
    return _of_parameters(layer, device, optimizer) | {
        "forward_s": forward_s,
        "recompute_s": recompute_s,
        "backward_s": backward_s,
        "activation_bytes": activations,
        "forward_peak_bytes": forward_peak,
        "graph_peak_bytes": graph_peak,
        "backward_peak_bytes": backward_peak,
        "cast_bytes": casts,
        "recorded_bytes": recorded_bytes(layer),
        "weight_grad_s": min(weight_s, backward_s),
        "deferred_bytes": deferred_bytes,
    }


def _of_parameters(layer: nn.Module, device: Device, optimizer: OptimizerSettings) -> dict[str, Any]:
    """Returns the costs that depend on the parameters alone."""
    sizes, frozen = [parameter.numel() for parameter in trainable(layer)], frozen_values(layer)
    return {
        "update_s": _UPDATE_TRAFFIC[optimizer.name] * sum(sizes) / device.bandwidth,
        "update_peak_bytes": _UPDATE_BYTES[optimizer.name] * max(sizes, default=0),
        "parameters": sum(sizes) + frozen,
        "frozen": frozen,
    }


def _deferred(layer: nn.Module, inputs: Tensors, run: Callable[[], Tensors], op_cost: OpCostMode) -> tuple[float, int]:
    """Returns the seconds of deferrable weight gradients, and the bytes held until then."""
    weight_grads = WeightGradStore(with_deferrable_linears(layer))
    for tensor in inputs:
        tensor.grad = None
    op_cost.settle()
    base = op_cost.alive
    deferred = weight_grads.run_deferred(partial(torch.autograd.backward, *_backward(run())))
    for tensor in inputs:
        tensor.grad = None
    op_cost.settle()
    held_bytes = op_cost.alive - base
    for grad in deferred:
        grad.add()
    return op_cost.seconds, max(0, held_bytes)


def _distinct(results: Tensor | Tensors) -> Tensors:
    """Returns each tensor once: an output may also be a skip."""
    return tuple({id(tensor): tensor for tensor in as_tuple(results)}.values())


def _backward(outputs: Tensors) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the outputs that require gradients, and gradients for them."""
    differentiable = [output for output in outputs if output.requires_grad]
    return differentiable, [torch.empty_like(output) for output in differentiable]


class OpCostMode(TorchDispatchMode):
    """A mode that counts the cost of operators.

    ``seconds``
        of the operators since ``settle``, on the slower of the device and its host. The device sums over operators the
        slower of two: matrix products at ``product_rate`` operations a second, or tensors at ``bandwidth`` bytes a
        second. The host starts each operator in ``launch_s``;
    ``alive``, ``peak``
        bytes of the tensors created under the mode that are alive now, and their peak.
    """

    def __init__(self, product_rate: float, bandwidth: float, launch_s: float = 0.0) -> None:
        super().__init__()
        self._product_rate, self._bandwidth, self._launch_s = product_rate, bandwidth, launch_s
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self._device_s = self._host_s = 0.0
        self.alive = self.peak = 0

    @property
    def seconds(self) -> float:
        return max(self._device_s, self._host_s)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        inputs, outputs = _tensors((args, kwargs)), _tensors(out)
        before = {_storage(tensor) for tensor in inputs}
        made = [tensor for tensor in outputs if _storage(tensor) not in before]
        if made or (outputs and func._schema.is_mutable):  # others return views
            self._time(func, (*inputs, *outputs), args, kwargs, out)
        for tensor in made:
            storage = tensor.untyped_storage()
            self._live[_storage(tensor)] = StorageWeakRef(storage), storage.nbytes()
        if outputs:
            self._count_alive()
        return out

    def settle(self) -> None:
        """Removes freed tensors, and resets the peak and the seconds."""
        self._device_s = self._host_s = 0.0
        self.peak = 0
        self._count_alive()

    def _time(self, func: Any, tensors: Iterable[Tensor], args: Any, kwargs: Any, out: Any) -> None:
        traffic = sum(tensor.nbytes for tensor in tensors)
        flops = op_flops(func, args, kwargs, out)
        self._device_s += max(flops / self._product_rate, traffic / self._bandwidth)
        if not func.__name__.startswith("empty"):  # these start no kernel
            self._host_s += self._launch_s

    def _count_alive(self) -> None:
        self._live = {key: entry for key, entry in self._live.items() if not entry[0].expired()}
        self.alive = sum(size for _, size in self._live.values())
        self.peak = max(self.peak, self.alive)


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
