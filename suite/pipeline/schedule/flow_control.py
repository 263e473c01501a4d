"""How many messages may be in flight between two cells, for the runtime, validation and planning."""

from __future__ import annotations

PREPOSTED_RECVS = 2
"""Receives posted ahead: one arrives while another is used; more would only hold memory."""

MAX_INFLIGHT_SENDS = 4
"""The most sends in flight from a cell to its two neighbours together, metadata included. They receive in order and
post ahead, so the oldest send is almost always complete; waiting for it bounds the memory of sent tensors. A cell d
cells away receives d - 1 micro-batches later, so that many more may be in flight to it."""


def max_inflight_sends(stages: int, virtual_stages: int) -> int:
    """Returns the most sends in flight from a cell to its two neighbours, where a stage holds ``virtual_stages`` cells.

    With several, the last stage and the first send each other a group of K micro-batches, forward and back, before
    either receives the other's first one; with far fewer in flight both would wait forever, from K = 14 on. The least
    that passes ``validate`` grows to K / 2 + 2 (tested for K up to 64, M between K and 4 K, 2 to 4 virtual stages).
    """
    return MAX_INFLIGHT_SENDS if virtual_stages == 1 else max(MAX_INFLIGHT_SENDS, 2 * stages // 3)
