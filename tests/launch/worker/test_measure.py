"""Measurements in a worker process: the memory of the process itself, and of its tensors."""

from types import SimpleNamespace

import pytest
import torch

from experiments.language_model.runs import language_model
from experiments.tables.table2_transformer import SleepingWork
from launch.backends.processes import run_processes
from launch.worker import distributed, measure
from models.language_model import LanguageModelShape
from suite.settings import PipelineSettings


def test_the_process_on_a_gpu_is_all_but_free_memory_and_what_torch_keeps_for_tensors(monkeypatch):
    """Of 100 bytes 40 are free, and torch keeps 30, of which 5 are workspaces of libraries."""
    module = SimpleNamespace(
        mem_get_info=lambda device: (40, 100), memory_reserved=lambda device: 30, memory_allocated=lambda device: 5
    )
    monkeypatch.setattr(measure, "module_of", lambda device: module)
    assert measure._process_bytes(torch.device("cuda", 0), 0) == 100 - 40 - (30 - 5)


def latency_s(rank, world, rendezvous, work, log):
    measure.busy_exchange_s = lambda peer: 5.0
    return measure.measure_layers(rank, world, rendezvous, work, 1, False, log).link.latency_s


@pytest.mark.parametrize("computes", [True, False])
def test_only_layers_that_compute_have_the_latency_of_busy_processes(tmp_path, computes):
    shape = LanguageModelShape(3, width=16, feed_forward=32, heads=2, vocabulary=50, time=8)
    work = language_model(shape, PipelineSettings(stages=2, micro_batches=4))
    work = work if computes else SleepingWork(((0.02, 0.02), (0.02, 0.02)), 4, 64)
    found = run_processes(latency_s, 2, work, tmp_path / "log")
    assert all((latency == 5.0) == computes for latency in found)


def exchange_s(rank, world, rendezvous):
    distributed.init_process_group(rank, world, rendezvous, 1)
    return distributed.busy_exchange_s(1 - rank)


def test_an_exchange_of_busy_processes_is_timed():
    assert all(0 <= seconds < 1 for seconds in run_processes(exchange_s, 2))


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
