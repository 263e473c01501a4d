"""The environment of GPU processes, and the refusal of one in which a stage's streams would share hardware queues."""

import os
from contextlib import nullcontext
from datetime import timedelta

import pytest
import torch

from launch.backends.processes import run_processes
from launch.worker.distributed import init_process_group, shared_gpu
from launch.worker.gpu_environment import QUEUES, check_module_loading, check_queues, gpu_environment
from suite.errors import SettingError
from suite.pipeline.model import topology
from suite.pipeline.model.cells import CellPlacement
from suite.pipeline.model.ties import TiedCopy, stages_with_copies
from suite.pipeline.model.topology import backend_of, transport_of
from suite.pipeline.runtime.skip import communicating_pairs

NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    for name in (*NAMES, "CUDA_MODULE_LOADING", QUEUES):
        monkeypatch.setenv(name, "")  # so that it is restored, whatever it was
        monkeypatch.delenv(name)


def test_kernels_are_loaded_at_the_start_and_streams_have_queues_unless_the_user_says_otherwise(monkeypatch):
    assert gpu_environment() | {"CUDA_MODULE_LOADING": "EAGER", QUEUES: "32"} == gpu_environment()
    monkeypatch.setenv("CUDA_MODULE_LOADING", "LAZY")
    assert "CUDA_MODULE_LOADING" not in gpu_environment()


@pytest.mark.parametrize(
    ("queues", "links", "fault"),
    [
        ("7", 2, "CUDA_DEVICE_MAX_CONNECTIONS is 7, and a stage of this run has 8 CUDA streams.*set it to 8 to 32"),
        ("33", 2, "CUDA_DEVICE_MAX_CONNECTIONS is 33"),
        ("many", 2, "CUDA_DEVICE_MAX_CONNECTIONS is many"),
        ("", 15, "34 CUDA streams, two for each of its 15 links.*fewer cells per stage .* or fewer skips"),
        ("8", 2, None),
        ("32", 14, None),
        ("", 14, None),
        ("1", 0, None),
    ],
)
def test_too_few_queues_are_refused(monkeypatch, queues, links, fault):
    if queues:
        monkeypatch.setenv(QUEUES, queues)
    with pytest.raises(SettingError, match=fault) if fault else nullcontext():
        check_queues(links, 1)


def test_each_group_of_stages_that_share_parameters_has_a_stream(monkeypatch):
    copies = {name: [TiedCopy(stage, 0, "table") for stage in stages] for name, stages in (("a", (0, 3)), ("b", (0,)))}
    copies |= {"c": copies["a"], "d": [TiedCopy(1, 0, "table"), *copies["a"]]}
    assert stages_with_copies(copies) == [(0, 1, 3), (0, 3)]
    monkeypatch.setenv(QUEUES, "8")
    with pytest.raises(SettingError, match="has 9 CUDA streams"):
        check_queues(2, 2)


def test_lazy_loading_is_refused_for_several_cells_a_stage_alone(monkeypatch):
    check_module_loading(2)
    monkeypatch.setenv("CUDA_MODULE_LOADING", "LAZY")
    check_module_loading(1)
    with pytest.raises(SettingError, match=r"CUDA_MODULE_LOADING is LAZY, and a stage .* has 2 cells.*unset"):
        check_module_loading(2)


def test_four_cells_a_stage_have_enough_queues():
    """Of K stages, the busiest has two links for each of its cells."""
    for stages in (2, 3, 4, 8):
        pairs = communicating_pairs((), [range(at, at + 1) for at in range(4 * stages)], CellPlacement(stages))
        check_queues(max(sum(k in (a % stages, b % stages) for a, b in pairs) for k in range(stages)), 1)


def test_groups_for_messages_have_few_thread_blocks_on_nccl(monkeypatch):
    """A CPU build of torch has no NCCL: its options are stood in for; `new_group` is called as in a run."""

    class Options:
        def __init__(self, is_high_priority_stream=False):
            self.is_high_priority_stream, self.config = is_high_priority_stream, type("Config", (), {})()

    given = []
    monkeypatch.setattr(topology.dist, "ProcessGroupNCCL", type("Nccl", (), {"Options": Options}), raising=False)
    monkeypatch.setattr(topology.dist, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
    monkeypatch.setattr(topology.dist, "new_group", lambda ranks, timeout, pg_options=None: given.append(pg_options))
    topology.make_groups(topology.RankCoord(0, 2, 1), 1.0, [(0, 1)])
    messages = [options for options in given if options is not None]
    assert len(messages) == 2  # activations and gradients
    assert messages[0] is not messages[1]  # torch writes the group's name and timeout into them
    assert all(options.is_high_priority_stream and options.config.max_ctas == 4 for options in messages)
    assert all(options._timeout == timedelta(seconds=1) for options in messages)  # torch warns of another one


def test_what_carries_messages_depends_on_the_device():
    found = [(transport_of(one), backend_of(one)) for one in (torch.device("cpu"), torch.device("cuda", 3))]
    assert found == [("gloo", "gloo"), ("nccl", "cpu:gloo,cuda:nccl")]


def allocator_settings(rank, world, rendezvous):
    os.environ.update(gpu_environment())
    return torch._C._accelerator_getAllocatorSettings()


def test_torch_reads_the_allocators_setting_from_this_variable():
    """Also when it is set after torch was imported, as in a worker that the forkserver forks."""
    assert run_processes(allocator_settings, 1) == ["expandable_segments:True"]


@pytest.mark.parametrize("name", NAMES)
def test_a_users_own_setting_of_the_allocator_is_kept(name, monkeypatch):
    monkeypatch.setenv(name, "max_split_size_mb:128")
    assert not set(gpu_environment()).intersection(NAMES)


def test_a_worker_on_a_gpu_has_it_before_cuda_starts_and_attends_with_a_kernel_that_is_ready_for_any_shape(monkeypatch):
    """cuDNN's is not: it builds a plan for each shape, in a tenth of a second."""
    before, seen = torch.backends.cuda.cudnn_sdp_enabled(), []
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: seen.append(os.environ.get("PYTORCH_ALLOC_CONF")))
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *args, **options: None)
    try:
        init_process_group(0, 1, "file:///nowhere")
        assert torch.backends.cuda.cudnn_sdp_enabled() == before
        init_process_group(0, 1, "file:///nowhere", gpu=0)
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        assert seen == ["expandable_segments:True"]
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def test_more_processes_than_gpus_share_them_each_as_if_on_a_node_of_its_own(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("NCCL_HOSTID", "")
    monkeypatch.delenv("NCCL_HOSTID")
    assert [shared_gpu(rank, 2) for rank in range(2)] == [0, 1]
    assert "NCCL_HOSTID" not in os.environ
    found = [(shared_gpu(rank, 4), os.environ["NCCL_HOSTID"]) for rank in range(4)]
    assert found == [(0, "rank 0"), (1, "rank 1"), (0, "rank 2"), (1, "rank 3")]
