"""Measurements in a worker process: the memory of the process itself, and of its tensors."""

from types import SimpleNamespace

import pytest
import torch

from launch.worker import measure


def test_the_process_on_a_gpu_is_all_but_free_memory_and_what_torch_keeps_for_tensors(monkeypatch):
    """Of 100 bytes 40 are free, and torch keeps 30, of which 5 are workspaces of libraries."""
    module = SimpleNamespace(
        mem_get_info=lambda device: (40, 100), memory_reserved=lambda device: 30, memory_allocated=lambda device: 5
    )
    monkeypatch.setattr(measure, "module_of", lambda device: module)
    assert measure._process_bytes(torch.device("cuda", 0), 0) == 100 - 40 - (30 - 5)


def peak_with(monkeypatch, peak, change):
    """Returns the peak that is measured where a step holds ``peak`` bytes, and ``change`` remain."""

    class Tracker:
        def __init__(self, device):
            self.peak, self.change = peak, change

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

    monkeypatch.setattr(measure, "MemoryTracker", Tracker)
    monkeypatch.setattr(measure, "init_process_group", lambda *args: torch.device("cpu"))
    monkeypatch.setattr(measure, "_run_steps", lambda *args: None)
    return measure.measure_peak_bytes(0, 1, "", None, (), None)


def test_the_peak_of_tensors_is_without_the_workspaces_of_libraries(monkeypatch):
    assert peak_with(monkeypatch, 1000, 66) == 934


def test_tensors_that_are_still_held_are_no_workspaces(monkeypatch):
    with pytest.raises(AssertionError, match="300 MiB of tensors are left after the steps"):
        peak_with(monkeypatch, 1 << 30, 300 << 20)
