"""Gradients averaged over replicas while the last backward of a step goes on.

    stage 0     ... R0 B0: layer 3 | layer 2 | layer 1 | layer 0 |
    replicas                       | mean 3  | mean 2  | mean 1  | mean 0 |

In a step's last backward a layer's gradients are whole as soon as it is through, those of the last layer first. They
leave in buckets of whole parameters, in one order that is the same on all replicas, whoever has which bucket first. So
the first stage, which nothing hides when it is done, has little left to exchange, and the others have even less.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from suite.pipeline.topology import Group

BUCKET_BYTES = 4 << 20
"""A bucket is full when it holds at least so much: large beside what a message costs, small beside a stage."""


class Reduction:
    """The mean over replicas of one stage's gradients."""

    def __init__(self, parameters: Sequence[nn.Parameter], tied: Sequence[nn.Parameter], replicas: Group) -> None:
        """``parameters`` are the stage's in the order of its layers. Those that are ``tied`` have copies on other
        stages, and these come first: their gradients wait for ``finish``."""
        self._group, self._replicas = replicas, dist.get_world_size(replicas)
        apart = set(map(id, tied))
        self._tied = list(tied)
        self._buckets = list(_buckets([p for p in reversed(parameters) if id(p) not in apart]))
        self._bucket_of = {id(p): bucket for bucket in self._buckets for p in bucket.parameters}
        self._sent = 0
        self._works: list[dist.Work] = []

    @property
    def idle(self) -> bool:
        """Whether nothing of a step has left that is not finished."""
        return not self._works

    @contextmanager
    def following(self, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
        """A context in which a backward makes the gradients of ``parameters`` whole: each leaves when it is."""
        hooks = [p.register_post_accumulate_grad_hook(lambda p: self.whole([p])) for p in parameters if p.requires_grad]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def whole(self, parameters: Iterable[nn.Parameter]) -> None:
        """Says that nothing is added any more to these gradients in this step, and sends what is complete with them."""
        for parameter in parameters:
            bucket = self._bucket_of.get(id(parameter))
            if bucket is not None:
                bucket.missing.discard(id(parameter))
        while self._sent < len(self._buckets) and not self._buckets[self._sent].missing:
            self._send(self._buckets[self._sent].parameters)
            self._sent += 1

    def send_rest(self) -> None:
        """Sends all that has not left yet but the tied."""
        self.whole(p for bucket in self._buckets for p in bucket.parameters)

    def finish(self) -> None:
        """Sends the tied gradients, which must be sums over their copies by now, and waits for all.

        ``.grad`` of each parameter is then the mean over replicas; one that a replica did not have counted as zero. All
        replicas must call this.
        """
        self.send_rest()
        for bucket in _buckets(self._tied):
            self._send(bucket.parameters)
        for work in self._works:
            work.wait()
        self._works.clear()
        self._sent = 0
        for bucket in self._buckets:
            bucket.refill()

    @torch.no_grad()
    def _send(self, parameters: Sequence[nn.Parameter]) -> None:
        """Begins the sum over replicas of some gradients, laid into one tensor, of which ``.grad`` are views then."""
        flat = _laid_together([torch.zeros_like(p) if p.grad is None else p.grad for p in parameters])
        flat.div_(self._replicas)
        for parameter, piece in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            parameter.grad = piece.view_as(parameter)
        work = dist.all_reduce(flat, group=self._group, async_op=True)
        assert work is not None
        self._works.append(work)


@dataclass
class _Bucket:
    """Parameters whose gradients leave together; ``missing`` are those not whole yet, by identity."""

    parameters: list[nn.Parameter]
    missing: set[int] = field(init=False)

    def __post_init__(self) -> None:
        self.refill()

    def refill(self) -> None:
        """Begins a step."""
        self.missing = set(map(id, self.parameters))


def _buckets(parameters: Sequence[nn.Parameter]) -> Iterator[_Bucket]:
    """Cuts the parameters, in order, into buckets of one dtype each."""
    held: list[nn.Parameter] = []
    for parameter in parameters:
        # a large one is not laid beside others: that would copy it
        full = _bytes(held) >= BUCKET_BYTES or _bytes([parameter]) >= BUCKET_BYTES
        if held and (full or parameter.dtype != held[0].dtype):
            yield _Bucket(held)
            held = []
        held.append(parameter)
    if held:
        yield _Bucket(held)


def _bytes(parameters: Iterable[nn.Parameter]) -> int:
    return sum(p.numel() * p.element_size() for p in parameters)


def _laid_together(gradients: Sequence[Tensor]) -> Tensor:
    """Returns the values one behind the other; a single tensor is taken as it is if its values lie so."""
    if len(gradients) == 1:
        return gradients[0].contiguous().view(-1)
    return torch.cat([gradient.reshape(-1) for gradient in gradients])
