"""Tensors sent with a label that says what they are, for stages that cannot know beforehand what comes next.

    header   16 numbers a tensor at most: dtype, dimensions, shape      tag 0, always of one size
    tensors                                                             tag 1, 2, ...

Sends are waited for only when many are under way. Every wait has a deadline.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from suite.pipeline.boundary import Announcement, Front, TensorSpec
from suite.pipeline.layers import Tensors
from suite.pipeline.topology import Group
from suite.pipeline.transport import Deadline, wait

_HEADER = 64
"""Numbers of a header."""


class Lane:
    """Parcels between this worker and one other, one way, taken in the order in which they were sent."""

    def __init__(
        self, peer: int, name: str, group: Group, device: torch.device, deadline: Deadline, unsent: int
    ) -> None:
        """``peer`` is the other's rank, ``name`` what it is called; ``unsent`` parcels may be under way."""
        self._peer, self._name, self._group, self._device = peer, name, group, device
        self._deadline, self._unsent = deadline, unsent
        self._sent: deque[list[tuple[dist.Work, Tensor]]] = deque()

    def send(self, tensors: Sequence[Tensor]) -> None:
        """Sends a parcel. Raises StallError when the oldest of too many is not taken in time."""
        numbers = Announcement((Front(tuple(map(TensorSpec.of, tensors))),), 0).encode()
        assert numbers.numel() <= _HEADER, f"a parcel of {len(tensors)} tensors has no room for its label"
        header = torch.zeros(_HEADER, dtype=torch.int64)
        header[: numbers.numel()] = numbers
        works = []
        for tag, tensor in enumerate((header, *(tensor.contiguous() for tensor in tensors))):
            work = dist.isend(tensor, self._peer, group=self._group, tag=tag) if tensor.numel() else None
            if work is not None:
                works.append((work, tensor))
        self._sent.append(works)
        self._settle(self._unsent)

    def take(self, what: str) -> Tensors:
        """Returns the next parcel's tensors. Raises StallError when it does not come in time."""
        header = torch.zeros(_HEADER, dtype=torch.int64)
        self._receive(header, 0, what)
        tensors = tuple(spec.empty(self._device) for spec in Announcement.decode(header).fronts[0].main)
        for at, tensor in enumerate(tensors):
            if tensor.numel():
                self._receive(tensor, 1 + at, what)
        return tensors

    def flush(self) -> None:
        """Waits until all that was sent is taken."""
        self._settle(0)

    def _receive(self, tensor: Tensor, tag: int, what: str) -> None:
        work = dist.irecv(tensor, self._peer, group=self._group, tag=tag)
        if work is not None:
            wait(work, self._deadline, f"{what} from {self._name}", tensor.device)

    def _settle(self, leave: int) -> None:
        while len(self._sent) > leave:
            for work, tensor in self._sent.popleft():
                wait(work, self._deadline, f"what was sent to {self._name} to be taken", tensor.device)
