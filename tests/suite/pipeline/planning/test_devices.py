"""Devices are found by their names and by sizes, and take as long as their rates say; this machine's are measured."""

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from suite.errors import SettingError
from suite.pipeline.planning.devices import DEVICES, find_device
from suite.pipeline.planning.estimate import OperatorRecorder
from suite.pipeline.planning.simulate import Link

INFINITY = float("inf")


def test_every_declared_device_is_found_by_its_name_and_has_possible_numbers():
    for name, device in DEVICES.items():
        assert device is find_device(name, memory=1) is find_device(name.lower(), memory=1)
        assert device.name == name
        assert 0.9 * device.nominal_gb <= device.memory_bytes / 2**30 <= device.nominal_gb
        assert device.memory_bytes >= 8 * 2**30 > device.process_bytes >= 0
        assert device.bf16 >= device.fp32 > 10**12
        assert device.bandwidth > device.link > 0
        assert device.product_rate("fp32") == device.efficiency * device.fp32 <= device.product_rate("bf16")
        assert device.messages == Link(device.link_latency_s, device.link)


@pytest.mark.parametrize(
    ("name", "memory"), [("16GiB", 16 * 2**30), ("24gb", 24 * 10**9), ("1.5 GiB", 3 * 2**29), ("8G", 8 * 2**30)]
)
def test_a_size_is_the_papers_core_with_that_memory(name, memory):
    device = find_device(name, memory=1)
    assert device == replace(DEVICES["TPUv3"], name=device.name, memory_bytes=memory)
    assert "TPUv3" in device.name


@pytest.mark.parametrize("name", ["H10", "", "0GiB", "-1GiB", "16", "16TiB", "GiB", "A100-0GB", "H100 PCIe"])
def test_unknown_devices_are_told_all_that_are_known(name):
    with pytest.raises(SettingError) as fault:
        find_device(name, memory=1)
    assert str(fault.value).startswith(f"no device is called {name!r}; devices are TPUv2, ")
    assert all(known in str(fault.value) for known in (*DEVICES, "this", "A100:60GiB"))


@pytest.mark.parametrize(
    ("name", "device", "memory"),
    [
        ("a100 80gb", "A100", None),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB", None),
        ("Tesla V100-SXM2-32GB", "V100-32GB", None),
        ("GeForce RTX 4090", "RTX 4090", None),
        ("AMD Instinct MI300X", "MI300X", None),
        ("A100:40GiB", "A100-40GB", 40 * 2**30),
        ("A100:60GiB", "A100", 60 * 2**30),
        ("A100:60GB", "A100", 60 * 10**9),
        ("H200:500GiB", "H200", 500 * 2**30),
    ],
)
def test_a_card_may_be_written_with_its_memory_and_as_its_maker_does(name, device, memory):
    found = find_device(name, memory=1)
    memory_bytes = memory or DEVICES[device].memory_bytes
    assert found == replace(DEVICES[device], name=found.name, memory_bytes=memory_bytes)


def test_this_machine_has_rates_of_its_own():
    device = find_device("This", memory=12_345)
    assert device.memory_bytes == 12_345
    assert "this machine" in device.name
    for rate in (device.fp32, device.bf16, device.bandwidth, device.link):
        assert 10**6 < rate < 10**18
    assert device.product_rate("fp32") == device.fp32, "what is measured is attained"


def device_of(product_rate, bandwidth, launch_s=0.0):
    rates = {"fp32": product_rate, "bandwidth": bandwidth, "launch_s": launch_s, "efficiency": 1.0}
    return replace(DEVICES["TPUv3"], **rates)


def test_a_device_is_as_slow_as_its_products_or_its_memory():
    with FakeTensorMode():
        left, right = torch.empty(5, 7), torch.empty(7, 2)
        with OperatorRecorder() as op_cost, op_cost.phase() as phase:
            left @ right  # 140 operations; 4 * (35 + 14 + 10) bytes
            left.relu()  # 4 * (35 + 35) bytes
    assert phase.flops == 140
    assert phase.seconds(device_of(2.0, 1.0), "fp32") == 236 + 280
    assert phase.seconds(replace(device_of(2.0, INFINITY), efficiency=0.5), "fp32") == 140
    assert phase.seconds(device_of(1.0, 4.0), "fp32") == 140 + 70


@pytest.mark.parametrize(("launch_s", "seconds"), [(30.0, 210.0), (40.0, 240.0)])
def test_a_device_waits_for_its_host_where_operators_are_small(launch_s, seconds):
    with FakeTensorMode(), OperatorRecorder() as op_cost, op_cost.phase() as phase:
        left, right = torch.empty(5, 7, 3), torch.empty(5, 3, 1)
        product = left @ right  # 210 operations
        for _ in range(5):
            product.view(35).relu()  # a view starts nothing, nor did the empty tensors
    assert phase.seconds(device_of(1.0, INFINITY, launch_s), "fp32") == seconds
