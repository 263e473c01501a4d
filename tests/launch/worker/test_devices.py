"""This machine's devices, with torch's functions replaced, and bf16 where they have no instructions for it."""

from types import SimpleNamespace

import pytest
import torch

from experiments.base.cluster import Cluster
from experiments.registry import resolve
from launch.worker import devices
from launch.worker.devices import gpus, multiplies_bf16, this_machine, with_available_precision
from suite.errors import PlacementError
from suite.pipeline.planning.devices import GIB

OLD_DRIVER = (
    "The NVIDIA driver on your system is too old (found version 12020). Please update your GPU driver by downloading "
    "and installing a new version from the URL: http://www.nvidia.com/Download/index.aspx"
)


@pytest.fixture
def without_gpu(monkeypatch):
    """Torch is built for CUDA 13.0 and ``torch.cuda.is_available`` is False, as on a machine with an old driver."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def refuse(text):
        def init():
            raise RuntimeError(text)

        monkeypatch.setattr(torch.cuda, "init", init)

    return refuse


@pytest.mark.parametrize("find", [this_machine, gpus])
def test_a_driver_that_is_too_old_is_refused_with_both_versions(without_gpu, find):
    without_gpu(OLD_DRIVER)
    with pytest.raises(PlacementError) as caught:
        find()
    for part in ("supports CUDA 12.2", f"torch {torch.__version__} is built for CUDA 13.0", "newer driver (580"):
        assert part in str(caught.value)


def test_gpus_that_do_not_start_are_refused_with_torchs_reason(without_gpu):
    text = "CUDA unknown error - this may be due to an incorrectly set up environment"
    without_gpu(text)
    with pytest.raises(PlacementError, match=rf"GPUs \({text}\); gpipe doctor .*VISIBLE_DEVICES= trains on the CPU"):
        this_machine()


@pytest.mark.parametrize(
    "text", ["Found no NVIDIA driver on your system. Please check it", "No CUDA GPUs are available"]
)
def test_a_machine_without_gpu_trains_on_its_cores(without_gpu, text):
    without_gpu(text)
    assert this_machine().kind == "cpu"
    with pytest.raises(PlacementError, match=r"built for CUDA 13\.0, sees no GPU; use a machine where nvidia-smi"):
        gpus()


def test_gpus_that_the_user_hides_are_not_missed(without_gpu, monkeypatch):
    without_gpu(OLD_DRIVER)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert this_machine().kind == "cpu"


@pytest.mark.parametrize(("majors", "has_bf16"), [((8, 9), True), ((9, 7), False)])
def test_gpus_have_the_memory_of_the_smallest_and_bf16_if_all_have_it(monkeypatch, majors, has_bf16):
    found = [SimpleNamespace(total_memory=(40 - at) * GIB, name=f"GPU {at}", major=m) for at, m in enumerate(majors)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(found))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: found[index])
    cluster = this_machine()
    assert (cluster.devices, cluster.bytes_per_device, cluster.kind) == (2, 39 * GIB, "gpu")
    assert (cluster.name, cluster.has_bf16) == ("GPU 0", has_bf16)


CORES = Cluster(2, GIB, "cpu")


def chosen(settings):
    return resolve("t12_400m", "laptop", CORES, settings)[0]


@pytest.mark.parametrize(
    ("asked", "cluster", "has", "named"),
    [
        ("bf16", CORES, False, "avx512_bf16 or amx_bf16"),
        ("bf16", Cluster(2, GIB, "gpu", name="Tesla V100", has_bf16=False), True, "Tesla V100"),
        ("bf16", CORES, True, None),
        ("bf16", Cluster(2, GIB, "gpu", name="NVIDIA A100", has_bf16=True), False, None),
        ("fp32", CORES, False, None),
    ],
)
def test_a_device_without_bf16_trains_in_fp32_and_says_it_once(monkeypatch, asked, cluster, has, named):
    monkeypatch.setattr(devices, "multiplies_bf16", lambda: has)
    lines, given = [], chosen(f"optimizer.precision={asked}")
    found = with_available_precision(given, cluster, lines.append)
    assert found.optimizer == (given if named is None else chosen("optimizer.precision=fp32")).optimizer
    assert [named in line for line in lines] == ([] if named is None else [True])


@pytest.mark.parametrize(
    ("features", "expected"),
    [
        ({"architecture": "x86_64", "avx2": True, "avx512_bf16": False, "amx_bf16": False}, False),
        ({"architecture": "x86_64", "avx512_bf16": True}, True),
        ({"architecture": "x86_64", "amx_bf16": True}, True),
        ({"architecture": "aarch64", "bf16": True}, True),
        ({"architecture": "aarch64", "bf16": False}, False),
    ],
)
def test_the_instructions_are_those_of_torch(monkeypatch, features, expected):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: features)
    assert multiplies_bf16() is expected
