"""The bytes that are allocated and freed inside a context."""

import pytest
import torch

from suite.pipeline.planning.memory_tracker import tracked_memory

CPU = torch.device("cpu")


def test_allocation_follows_what_is_made_and_freed_from_what_stood():
    """4,000, and 8,000, less 4,000, and 2,000: 12,000 at most."""
    with tracked_memory(CPU) as earlier:
        first = torch.empty(1_000)
        second = torch.empty(1_000, dtype=torch.float64)
        del first
        third = torch.empty(500)
    assert (earlier.peak, earlier.change) == (12_000, 10_000)
    with tracked_memory(CPU) as memory_tracker:
        del second
        fourth = torch.empty(200)
        third.zero_()
    assert (memory_tracker.peak, memory_tracker.change) == (0, 800 - 8_000)
    assert third.numel() + fourth.numel() == 700


def test_allocation_ends_with_the_error_inside_it():
    with pytest.raises(ZeroDivisionError), tracked_memory(CPU):
        raise ZeroDivisionError
    with tracked_memory(CPU) as memory_tracker:
        kept = torch.empty(10)
    assert memory_tracker.peak == 4 * kept.numel()
