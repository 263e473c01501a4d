"""Runs operators on tensors without data and notes what they would cost: floating point operations, traffic, memory.

Under ``FakeTensorMode`` an operator computes shapes alone, those of the CPU's kernels, fused attention included; so a
layer of any size passes in milliseconds, forward and backward, and needs no memory.
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


class Meter(TorchDispatchMode):
    """A mode in which operators are counted.

    ``seconds``
        the sum over operators of what bounds each: its products at ``product_rate`` operations a second, or its
        tensors at ``bandwidth`` bytes a second;
    ``alive``, ``peak``
        bytes of the tensors made under the mode that stand now, and the most that ever stood.
    """

    def __init__(self, product_rate: float, bandwidth: float) -> None:
        super().__init__()
        self._product_rate, self._bandwidth = product_rate, bandwidth
        self._standing: dict[int, tuple[StorageWeakRef, int]] = {}
        self.seconds = 0.0
        self.alive = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        given, made = _tensors((args, kwargs)), _tensors(out)
        if made:
            self._time(func, given, made, args, kwargs, out)
            self._weigh(given, made)
        return out

    def settle(self) -> None:
        """Forgets tensors that have been freed, and starts a new peak."""
        self._standing = {key: entry for key, entry in self._standing.items() if not entry[0].expired()}
        self.alive = self.peak = sum(size for _, size in self._standing.values())

    def _time(self, func: Any, given: list[Tensor], made: list[Tensor], args: Any, kwargs: Any, out: Any) -> None:
        before = {_storage(tensor) for tensor in given}
        viewed = all(_storage(tensor) in before for tensor in made) and not func._schema.is_mutable
        if viewed:
            return
        traffic = sum(map(_bytes, given)) + sum(map(_bytes, made))
        products = _products(func, args, kwargs, out)
        self.seconds += max(products / self._product_rate, traffic / self._bandwidth)

    def _weigh(self, given: Iterable[Tensor], made: Iterable[Tensor]) -> None:
        before = {_storage(tensor) for tensor in given}
        for tensor in made:
            key = _storage(tensor)
            if key not in before:
                storage = tensor.untyped_storage()
                self._standing[key] = StorageWeakRef(storage), storage.nbytes()
        self._standing = {key: entry for key, entry in self._standing.items() if not entry[0].expired()}
        self.alive = sum(size for _, size in self._standing.values())
        self.peak = max(self.peak, self.alive)


def _products(func: Any, args: Any, kwargs: Any, out: Any) -> float:
    """Returns the operations of matrix products, convolutions and attention; of all else traffic is what counts."""
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
