"""Tensors sent with a header that describes them, for stages that do not know in advance what comes next.

    header   16 numbers a tensor at most: dtype, dimensions, shape      tag 0, always of one size
    tensors                                                             tag 1, 2, ...

A send waits only if too many are in flight. Every wait has a deadline.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from suite.pipeline.model.layers import Tensors
from suite.pipeline.model.topology import Group
from suite.pipeline.runtime.boundary import BoundaryMetadata, CutSpec, TensorSpec
from suite.pipeline.runtime.p2p import Deadline, wait

_HEADER = 64
"""Numbers in a header."""


class TensorChannel:
    """Messages between this worker and one other, in one direction, received in the order of sending."""

    def __init__(
        self, peer: int, name: str, group: Group, device: torch.device, deadline: Deadline, max_inflight_sends: int
    ) -> None:
        """``peer`` is the other rank, ``name`` its name in errors; ``max_inflight_sends`` messages may be in flight."""
        self._peer, self._name, self._group, self._device = peer, name, group, device
        self._deadline, self._max_inflight_sends = deadline, max_inflight_sends
        self._sent: deque[list[tuple[dist.Work, Tensor]]] = deque()

    def send(self, tensors: Sequence[Tensor]) -> None:
        """Sends a message. Raises StallError when too many are in flight and the oldest is not received in time."""
        numbers = BoundaryMetadata((CutSpec(tuple(map(TensorSpec.of, tensors))),), 0).encode()
        assert numbers.numel() <= _HEADER, f"a message of {len(tensors)} tensors needs a longer header"
        header = torch.zeros(_HEADER, dtype=torch.int64)
        header[: numbers.numel()] = numbers
        works = []
        for tag, tensor in enumerate((header, *(tensor.contiguous() for tensor in tensors))):
            work = dist.isend(tensor, self._peer, group=self._group, tag=tag) if tensor.numel() else None
            if work is not None:
                works.append((work, tensor))
        self._sent.append(works)
        self._wait_for_oldest(self._max_inflight_sends)

    def recv(self, what: str) -> Tensors:
        """Returns the next message's tensors. Raises StallError when it does not arrive in time."""
        header = torch.zeros(_HEADER, dtype=torch.int64)
        self._receive(header, 0, what)
        tensors = tuple(spec.empty(self._device) for spec in BoundaryMetadata.decode(header).cuts[0].main)
        for at, tensor in enumerate(tensors):
            if tensor.numel():
                self._receive(tensor, 1 + at, what)
        return tensors

    def flush(self) -> None:
        """Waits until all sends are complete."""
        self._wait_for_oldest(0)

    def _receive(self, tensor: Tensor, tag: int, what: str) -> None:
        work = dist.irecv(tensor, self._peer, group=self._group, tag=tag)
        if work is not None:
            wait(work, self._deadline, f"{what} from {self._name}", tensor.device)

    def _wait_for_oldest(self, keep: int) -> None:
        while len(self._sent) > keep:
            for work, tensor in self._sent.popleft():
                wait(work, self._deadline, f"the messages to {self._name} to be received", tensor.device)
