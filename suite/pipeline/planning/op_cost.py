"""Runs operators on fake tensors and counts their cost: floating point operations, memory traffic, memory.

Under ``FakeTensorMode`` an operator computes only shapes, those of the CPU's kernels, fused attention included. So a
layer of any size takes milliseconds, forward and backward, and needs no memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count


class OpCostMode(TorchDispatchMode):
    """A mode that counts the cost of operators.

    ``seconds``
        the sum over operators of the slower of two: matrix products at ``product_rate`` operations a second, or
        tensors at ``bandwidth`` bytes a second;
    ``alive``, ``peak``
        bytes of the tensors created under the mode that are alive now, and their peak.
    """

    def __init__(self, product_rate: float, bandwidth: float) -> None:
        super().__init__()
        self._product_rate, self._bandwidth = product_rate, bandwidth
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.seconds = 0.0
        self.alive = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        inputs, outputs = _tensors((args, kwargs)), _tensors(out)
        if outputs:
            self._time(func, inputs, outputs, args, kwargs, out)
            self._count_bytes(inputs, outputs)
        return out

    def settle(self) -> None:
        """Removes freed tensors, and resets the peak."""
        self._live = {key: entry for key, entry in self._live.items() if not entry[0].expired()}
        self.alive = self.peak = sum(size for _, size in self._live.values())

    def _time(self, func: Any, inputs: list[Tensor], outputs: list[Tensor], args: Any, kwargs: Any, out: Any) -> None:
        input_storages = {_storage(tensor) for tensor in inputs}
        is_view = all(_storage(tensor) in input_storages for tensor in outputs) and not func._schema.is_mutable
        if is_view:
            return
        traffic = sum(map(_bytes, inputs)) + sum(map(_bytes, outputs))
        flops = _flops(func, args, kwargs, out)
        self.seconds += max(flops / self._product_rate, traffic / self._bandwidth)

    def _count_bytes(self, inputs: Iterable[Tensor], outputs: Iterable[Tensor]) -> None:
        input_storages = {_storage(tensor) for tensor in inputs}
        for tensor in outputs:
            key = _storage(tensor)
            if key not in input_storages:
                storage = tensor.untyped_storage()
                self._live[key] = StorageWeakRef(storage), storage.nbytes()
        self._live = {key: entry for key, entry in self._live.items() if not entry[0].expired()}
        self.alive = sum(size for _, size in self._live.values())
        self.peak = max(self.peak, self.alive)


def _flops(func: Any, args: Any, kwargs: Any, out: Any) -> float:
    """Returns the operations of matrix products, convolutions and attention; other operators are bound by traffic."""
    packet = func._overloadpacket
    if packet is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu:
        return float(sdpa_flop_count(*(tensor.shape for tensor in args[:3])))
    if packet is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward:
        return float(sdpa_backward_flop_count(*(tensor.shape for tensor in args[:4])))
    count = flop_registry.get(packet)
    return 0.0 if count is None else float(count(*args, **kwargs, out_val=out))


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
