"""Measurements in a worker process: the memory of the process itself, its layers, and the link."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from experiments.language_model.runs import language_model
from experiments.tables.table2 import SleepingWork
from launch.backends.processes import run_processes
from launch.worker import distributed, measure
from models.language_model import LanguageModelShape
from suite.pipeline.planning.simulate import Link
from suite.settings import PipelineSettings
from tests.quick_measuring import estimates


def test_the_process_on_a_gpu_is_all_but_free_memory_and_what_torch_keeps_for_tensors(monkeypatch):
    """Of 100 bytes 40 are free, and torch keeps 30, of which 5 are workspaces of libraries."""
    module = SimpleNamespace(
        mem_get_info=lambda device: (40, 100), memory_reserved=lambda device: 30, memory_allocated=lambda device: 5
    )
    monkeypatch.setattr(measure, "module_of", lambda device: module)
    assert measure._process_bytes(torch.device("cuda", 0), 0) == 100 - 40 - (30 - 5)


def overhead_s(rank, world, rendezvous, work, log):
    measure.busy_link = lambda peer, idle, size: replace(idle, overhead_s=5.0)
    return measure.measure_layers(rank, world, rendezvous, work, estimates(work), 1, False, log).link.overhead_s


@pytest.mark.slow
@pytest.mark.parametrize("computes", [True, False])
def test_only_layers_that_compute_have_messages_that_keep_them_busy(tmp_path, computes):
    shape = LanguageModelShape(3, width=16, feed_forward=32, heads=2, vocabulary=50, context_length=8)
    work = language_model(shape, PipelineSettings(stages=2, micro_batches=4))
    work = work if computes else SleepingWork(((0.02, 0.02), (0.02, 0.02)), 4, 64)
    found = run_processes(overhead_s, 2, work, tmp_path / "log")
    assert found == ([5.0, 5.0] if computes else [0.0, 0.0])


def link_of_busy_ranks(rank, world, rendezvous):
    distributed.init_process_group(rank, world, rendezvous, 1)
    return distributed.busy_link(1 - rank, Link(0.5, 1e9), 4 << 20)


@pytest.mark.slow
def test_the_link_of_busy_processes_is_timed():
    for link in run_processes(link_of_busy_ranks, 2):
        assert (link.latency_s, link.bytes_per_s) == (0.5, 1e9)  # an idle one is never faster
        assert 0 <= link.overhead_s < 0.1
        assert 0 < link.overhead_s_per_byte < 1e-7  # two processes copy 4 MiB: in 0.1 ms at least, in 400 at most
