"""Estimates what each layer would cost on a declared device, from a run on tensors without data.

The walk is that of ``suite.pipeline.profile``, layer by layer, equal layers once; in the place of a clock and an
allocator stands the ``Meter``. No device and no memory are needed, whatever the size of the model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from suite.pipeline.batchnorm import noted_bytes
from suite.pipeline.boundary import Boundary, Front, TensorSpec, announced, narrowed
from suite.pipeline.costs import LayerCost
from suite.pipeline.devices import Device
from suite.pipeline.fronts import Fronts, standing
from suite.pipeline.layers import Tensors, as_tuple, frozen_values, scored, structure_of, trainable
from suite.pipeline.meter import Meter
from suite.pipeline.profile import MicroBatch
from suite.pipeline.put_off import Splits, splitting
from suite.pipeline.skip import find_skips, takes_of
from suite.settings import OptimizerSettings

_UPDATE_TRAFFIC = {"adamw": 32, "adafactor": 36, "rmsprop": 32}
"""Bytes moved for each parameter by norm and update: weight, gradient and moments read, weight and moments written;
RMSProp a momentum instead of a mean; Adafactor writes and reads its whole update instead of moments."""

_UPDATE_ROOM = {"adamw": 8, "adafactor": 12, "rmsprop": 12}
"""Bytes of room for each parameter of the largest tensor: its squares in fp64 for the norm; Adafactor's and
RMSProp's update too."""


def estimate(
    layers: Sequence[nn.Module], loss: nn.Module, data: MicroBatch, device: Device, optimizer: OptimizerSettings
) -> list[LayerCost]:
    """Returns the estimated cost of each of the meta-device ``layers``; the loss counts to the last."""
    skips = find_skips(layers)
    fronts = Fronts(layers, optimizer.precision == "bf16").all(Front(tuple(map(TensorSpec.of, data.inputs))))
    targets = tuple(map(TensorSpec.of, data.targets))
    known: dict[Hashable, dict[str, Any]] = {}
    costs = []
    for index, layer in enumerate(layers):
        last = index == len(layers) - 1
        alive = {one.name: one.spec for one in fronts[index].skips}
        arriving = fronts[index].main + tuple(alive[name] for name in takes_of(layer))
        key = (structure_of(layer), arriving, last)
        if key not in known:
            end = (loss, targets) if last else None
            # copied outside the mode, under which a buffer cannot be
            own = copy.deepcopy(layer)
            with FakeTensorMode(allow_non_fake_inputs=True):
                known[key] = _estimate(own, arriving, end, device, optimizer)
        costs.append(LayerCost(**known[key], **standing(fronts, skips, index)))
    return costs


def _estimate(
    layer: nn.Module, arriving: Boundary, end: tuple[nn.Module, Boundary] | None, device: Device,
    optimizer: OptimizerSettings,
) -> dict[str, Any]:  # fmt: skip
    """Runs one layer four ways: without graph, with graph, backward, and that in two parts."""
    _fake(layer)
    host = torch.device("cpu")
    inputs = tuple(spec.empty(host).requires_grad_(spec.needs_gradient) for spec in arriving)
    targets = () if end is None else tuple(spec.empty(host) for spec in end[1])
    narrow = optimizer.precision == "bf16"
    leaving: Boundary = ()
    if end is None:
        first = _distinct(layer(*inputs))
        leaving = tuple(map(TensorSpec.of, narrowed(first) if narrow else first))
    meter = Meter(device.product_rate(optimizer.precision), device.bandwidth)

    def run() -> Tensors:
        with torch.autocast("cpu", torch.bfloat16, enabled=optimizer.precision == "bf16"):
            if end is not None:
                return (scored(layer, end[0], inputs, targets)[0],)
            outputs = _distinct(layer(*inputs))
        return announced(outputs, leaving)

    with meter:
        with torch.no_grad():
            run()
        forward_s, forward_peak = meter.seconds, meter.peak
        meter.settle()
        outputs = run()
        rebuild_s, graph_peak = meter.seconds - forward_s, meter.peak
        meter.settle()
        activations = meter.alive
        before, gradients = _backward(outputs)
        meter.settle()
        base = meter.alive
        torch.autograd.backward(before, gradients)
        backward_s = meter.seconds - forward_s - rebuild_s
        backward_peak = max(0, meter.peak - base)
        weight_s, put_off = _put_off(layer, inputs, run, meter)
    sizes = [parameter.numel() for parameter in trainable(layer)]
    frozen = frozen_values(layer)
    return {
        "forward_s": forward_s, "rebuild_s": rebuild_s, "backward_s": backward_s,
        "update_s": _UPDATE_TRAFFIC[optimizer.name] * sum(sizes) / device.bandwidth, "parameters": sum(sizes) + frozen,
        "activations": activations, "forward_peak": forward_peak, "graph_peak": graph_peak,
        "backward_peak": backward_peak, "update_peak": _UPDATE_ROOM[optimizer.name] * max(sizes, default=0),
        "frozen": frozen, "noted": noted_bytes(layer), "weight_s": min(weight_s, backward_s), "put_off": put_off,
    }  # fmt: skip


def _put_off(layer: nn.Module, inputs: Tensors, run: Callable[[], Tensors], meter: Meter) -> tuple[float, int]:
    """Returns the seconds of weights' gradients that can be put off, and the bytes that stand until then."""
    splits = Splits(splitting(layer))
    for tensor in inputs:
        tensor.grad = None
    meter.settle()
    base = meter.alive
    later = splits.collect(lambda: torch.autograd.backward(*_backward(run())))
    for tensor in inputs:
        tensor.grad = None
    meter.settle()
    standing, begun = meter.alive - base, meter.seconds
    for add in later:
        add()
    return meter.seconds - begun, max(0, standing)


def _distinct(results: Tensor | Tensors) -> Tensors:
    """Returns each tensor once: an output may be a skip too."""
    return tuple({id(tensor): tensor for tensor in as_tuple(results)}.values())


def _backward(outputs: Tensors) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the outputs that carry gradients and gradients for them."""
    carrying = [output for output in outputs if output.requires_grad]
    return carrying, [torch.empty_like(output) for output in carrying]


def _fake(layer: nn.Module) -> None:
    """Gives a meta-device layer parameters and buffers that claim to lie on the CPU, gradients too where they are not
    frozen.

    Gradients stand already, so that the backward's peak holds none but temporary ones.
    """
    for module in layer.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
            made: Any = nn.Parameter(empty, parameter.requires_grad)
            if parameter.requires_grad:
                made.grad = torch.empty_like(empty)
            setattr(module, name, made)
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu"))
    layer.train()
