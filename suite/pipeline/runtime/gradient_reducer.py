"""Sums gradients over replicas during the last backward of a step, or the last ``W``.

    stage 0     ... R0 B0: layer 3 | layer 2 | layer 1 | layer 0 |
    replicas                       | sum 3   | sum 2   | sum 1   | sum 0  |

In a step's last backward, or last ``W``, a layer's gradients are complete as soon as the layer is done, those of the
last layer first. They are reduced in buckets of whole parameters, in the same order on all replicas. So little
communication is left after the backward of the first stage, and even less on the others. A gradient is complete once
the backward has added to it as often as in earlier steps: reentrant checkpoints do so at each of their calls. So the
first backward has all its reductions behind it.

Without shards every replica gets every sum, by an all-reduce. With ZeRO-1's shards each part of a bucket is reduced to
the one replica that has that shard, which is half the traffic.

    bucket       | layer 2        | layer 1   |        a shard is a slice of all parameters in layer order
    reduced to   | 1 |     0      |     0     |
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from suite.errors import SettingError
from suite.pipeline.model.topology import Group

BUCKET_BYTES = 4 << 20
"""A bucket is full when it holds this much: large compared with a message's overhead, small compared with a stage. With
gloo, buckets of 25 MiB take as long."""

ACCELERATOR_BUCKET_BYTES = 25 << 20
"""The same on an accelerator, whose links need longer messages: the default of torch's DistributedDataParallel."""


@dataclass(frozen=True)
class Shards:
    """How ZeRO-1 divides each flat parameter group: replica r has the r-th shard."""

    places: Mapping[int, tuple[int, int]]
    """By ``id`` of a parameter: its offset in the flat parameter group, and the size of a shard of that group
    (DeepSpeed's ``partition_size``). The last shard may be shorter."""

    def slices(self, parameters: Iterable[nn.Parameter]) -> list[tuple[int, int]]:
        """Returns (replica, values) for each slice of these parameters' values that is in one shard, in order. A
        parameter without values has no place."""
        slices: list[tuple[int, int]] = []
        for parameter in (parameter for parameter in parameters if parameter.numel()):
            at, size = self.places[id(parameter)]
            end = at + parameter.numel()
            while at < end:
                replica = at // size
                slice_end = min(end, (replica + 1) * size)
                slices.append((replica, slice_end - at))
                at = slice_end
        by_replica = itertools.groupby(slices, key=lambda each: each[0])
        return [(replica, sum(count for _, count in same)) for replica, same in by_replica]


class GradientReducer:
    """The sum over replicas of one stage's gradients."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        tied: Sequence[nn.Parameter],
        group: Group,
        shards: Shards | None = None,
    ) -> None:
        """``parameters`` are the stage's in the order of its layers. ``tied`` ones have copies on other stages whose
        gradients must be summed first, so theirs wait for ``finish``. ``group`` is the stage in all replicas."""
        self._group, self._shards = group, shards
        tied_ids = set(map(id, tied))
        self._tied = list(tied)
        self._buckets = list(_buckets([p for p in reversed(parameters) if id(p) not in tied_ids]))
        self._parts = Counter[int]()  # of each gradient, at most
        self._begin_step()

    def _begin_step(self) -> None:
        self._started, self._added = 0, Counter[int]()
        self._missing = {id(p) for bucket in self._buckets for p in bucket}  # whose gradients are not complete yet
        self._works: list[dist.Work] = []

    @property
    def idle(self) -> bool:
        """Whether no reduction is pending."""
        return not self._works

    @contextmanager
    def overlap_backward(self, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
        """A context for a backward that completes the gradients of ``parameters``; each is reduced when it is ready."""
        own = (p for p in parameters if p.requires_grad and id(p) in self._missing)  # tied ones wait for ``finish``
        hooks = [p.register_post_accumulate_grad_hook(self._count) for p in own]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _count(self, parameter: nn.Parameter) -> None:
        """Counts a part of a gradient. Raises SettingError for one more than in earlier steps: the others are sent."""
        if id(parameter) not in self._missing:
            raise SettingError(
                f"a backward adds to a parameter of shape {tuple(parameter.shape)} more often than in earlier steps; "
                "call torch.utils.checkpoint with use_reentrant=False, or set pipeline.replicas=1"
            )
        self._added[id(parameter)] += 1
        if self._added[id(parameter)] == self._parts[id(parameter)]:
            self.mark_ready([parameter])

    def mark_ready(self, parameters: Iterable[nn.Parameter]) -> None:
        """Marks gradients as complete in this step, and starts the reduction of the buckets that are now complete."""
        self._missing.difference_update(map(id, parameters))
        while self._started < len(self._buckets) and self._missing.isdisjoint(map(id, self._buckets[self._started])):
            self._start_reduction(self._buckets[self._started])
            self._started += 1

    def start_remaining(self) -> None:
        """Starts the reduction of all remaining buckets except the tied ones."""
        self.mark_ready(p for bucket in self._buckets for p in bucket)

    def finish(self) -> None:
        """Reduces the tied gradients, which must be sums over their copies by now, and waits for all.

        ``.grad`` of each parameter is then the sum over replicas; a gradient that a replica lacks counts as zero. With
        shards only the replica's own values are sums, and the others mean nothing. All replicas must call this.
        """
        self.start_remaining()
        for bucket in _buckets(self._tied):
            self._start_reduction(bucket)
        for work in self._works:
            work.wait()
        self._parts |= self._added
        self._begin_step()

    @torch.no_grad()
    def _start_reduction(self, parameters: Sequence[nn.Parameter]) -> None:
        """Starts the reduction of some gradients in one flat tensor; ``.grad`` become views of it."""
        flat = _flatten([torch.zeros_like(p) if p.grad is None else p.grad for p in parameters])
        for parameter, piece in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            parameter.grad = piece.view_as(parameter)
        if self._shards is None:
            self._add(dist.all_reduce(flat, group=self._group, async_op=True))
            return
        slices = self._shards.slices(parameters)
        for (replica, _), part in zip(slices, flat.split([count for _, count in slices]), strict=True):
            self._add(dist.reduce(part, group=self._group, group_dst=replica, async_op=True))

    def _add(self, work: dist.Work | None) -> None:
        """Adds a reduction for which ``finish`` waits."""
        assert work is not None
        self._works.append(work)


def _buckets(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Divides the parameters, in order, into buckets of one dtype each, whose gradients are reduced together."""
    bucket: list[nn.Parameter] = []
    for parameter in parameters:
        # a large one gets a bucket of its own, to avoid a copy
        size = BUCKET_BYTES if parameter.device.type == "cpu" else ACCELERATOR_BUCKET_BYTES
        full = sum(p.nbytes for p in bucket) >= size or parameter.nbytes >= size
        if bucket and (full or parameter.dtype != bucket[0].dtype):
            yield bucket
            bucket = []
        bucket.append(parameter)
    if bucket:
        yield bucket


def _flatten(gradients: Sequence[Tensor]) -> Tensor:
    """Returns the values as one flat tensor; a single contiguous tensor is not copied."""
    if len(gradients) == 1:
        return gradients[0].contiguous().view(-1)
    return torch.cat([gradient.reshape(-1) for gradient in gradients])
