"""Tensors sent with a header that describes them, for stages that do not know in advance what comes next.

    header   16 numbers a tensor at most: dtype, dimensions, shape      tag 0, always of one size
    tensors                                                             tag 1, 2, ...

A send waits only if too many are in flight. Every wait has a timeout.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from suite.pipeline.model.layers import Tensors
from suite.pipeline.model.topology import Group
from suite.pipeline.runtime.boundary import CutSpec
from suite.pipeline.runtime.metadata import BoundaryMetadata, MetadataCodec
from suite.pipeline.runtime.p2p import InflightSends, MessageTimeout, recv_into

_HEADER = 64
"""Numbers in a header."""


class TensorChannel:
    """Messages between this worker and one other, in one direction, received in the order of sending."""

    def __init__(
        self, peer: int, name: str, group: Group, device: torch.device, timeout: MessageTimeout, max_inflight_sends: int
    ) -> None:
        """``peer`` is the other rank, ``name`` its name in errors; ``max_inflight_sends`` messages may be in flight."""
        self._peer, self._name, self._group, self._device = peer, name, group, device
        self._timeout, self._max_inflight_sends = timeout, max_inflight_sends
        self._sends = InflightSends(timeout)

    def send(self, tensors: Sequence[Tensor]) -> None:
        """Sends a message. Raises StallError when too many are in flight and the oldest is not received in time."""
        numbers = MetadataCodec().encode(BoundaryMetadata((CutSpec.of(tensors),), 0))
        assert numbers.numel() <= _HEADER, f"a message of {len(tensors)} tensors needs a longer header"
        header = torch.zeros(_HEADER, dtype=torch.int64)
        header[: numbers.numel()] = numbers
        contiguous = [tensor.contiguous() for tensor in tensors]
        what = f"the messages to {self._name} to be received"
        self._sends.post((header, *contiguous), self._peer, self._group, 0, what)
        self._sends.wait_until(at_most=self._max_inflight_sends)

    def recv(self, what: str) -> Tensors:
        """Returns the next message's tensors. Raises StallError when it does not arrive in time."""
        header = torch.zeros(_HEADER, dtype=torch.int64)
        self._receive(header, 0, what)
        tensors = tuple(spec.empty(self._device) for spec in MetadataCodec().decode(header).cuts[0].main)
        for at, tensor in enumerate(tensors):
            if tensor.numel():
                self._receive(tensor, 1 + at, what)
        return tensors

    def wait_for_sends(self) -> None:
        """Waits until all sends are complete."""
        self._sends.wait_until(at_most=0)

    def _receive(self, tensor: Tensor, tag: int, what: str) -> None:
        recv_into(tensor, self._peer, self._group, tag, self._timeout, f"{what} from {self._name}")
