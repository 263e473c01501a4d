"""What a stage posts when, and how many of its messages may be in flight: one record for each transport.

    gloo   A receive costs nothing until its message comes, so two are posted ahead in each direction.
    nccl   A receive is a kernel: it holds its stream and some multiprocessors until its message comes. A gradient's is
           posted right before its backward, an activation's while the micro-batch before it runs.

The runtime, validation, simulation and the memory of a plan all read it here.
"""

from __future__ import annotations

from dataclasses import dataclass

from suite.pipeline.model.topology import TransportName

MAX_INFLIGHT_SENDS = 4
"""The most unfinished sends of a stage's only cell to its two neighbours together, metadata included. The target of a
skip, d cells away, has a limit of its own, d - 1 higher. With more, the cell waits for its oldest send, which bounds
the memory of sent tensors. It seldom waits long, because neighbours receive in order and post ahead."""


@dataclass(frozen=True, slots=True)
class FlowControl:
    """The messages of a cell that are posted, and not used or received yet."""

    activation_recvs_ahead: int = 2
    """Receives of activations posted ahead of the one that an action uses: one arrives while another is used; more
    would only hold memory."""
    gradient_recvs_ahead: int = 2
    """The same for gradients. With 0 a receive is posted right before its backward."""
    max_inflight_sends: int = MAX_INFLIGHT_SENDS

    def recvs_ahead(self, direction: int) -> int:
        """Returns the receives posted ahead in the direction of activations, 1, or of gradients, -1."""
        return self.activation_recvs_ahead if direction > 0 else self.gradient_recvs_ahead

    def max_sends_to(self, distance: int) -> int:
        """Returns the most sends in flight to a cell that is ``distance`` cells away."""
        return self.max_inflight_sends + distance - 1


GLOO = FlowControl()
"""That of stages with one cell on gloo."""

_RECVS_AHEAD: dict[TransportName, tuple[int, int]] = {"gloo": (2, 2), "nccl": (1, 0)}
"""Receives of activations and of gradients that are posted ahead."""


def flow_control(transport: TransportName, stages: int, virtual_stages: int) -> FlowControl:
    """Returns the flow control of K stages that hold ``virtual_stages`` cells each.

    With several cells, the last stage and the first send each other a group of K micro-batches, forward and back,
    before either receives the other's first one; with far fewer in flight both would wait forever, from K = 14 on. The
    least that passes ``validate`` grows to K / 2 + 2 (tested for K up to 64, M between K and 4 K, 2 to 4 virtual
    stages).
    """
    sends = MAX_INFLIGHT_SENDS if virtual_stages == 1 else max(MAX_INFLIGHT_SENDS, 2 * stages // 3)
    return FlowControl(*_RECVS_AHEAD[transport], sends)
