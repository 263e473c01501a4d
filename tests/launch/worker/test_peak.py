"""The peak of a device: declared for known GPUs, otherwise measured once."""

import pytest
import torch

from launch.worker import peak
from launch.worker.peak import declared_peak, device_peak
from suite.training.utilization import Peak

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "precision", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", "989 TFLOP/s declared"),
        ("NVIDIA H100 80GB HBM3", "fp32", "67 TFLOP/s declared"),
        ("NVIDIA H100 PCIe", "bf16", "None"),
        ("NVIDIA GeForce RTX 4090", "fp32", "None"),
    ],
)
def test_known_gpus_have_a_declared_peak(name, precision, expected):
    assert str(declared_peak(name, precision)) == expected


def test_a_peak_is_measured_once_for_each_precision_and_number_of_threads(tmp_path, monkeypatch):
    monkeypatch.setattr(peak, "MEASURE_S", 0.02)
    first = device_peak(CPU, "fp32", tmp_path)
    assert first.source == "measured"
    assert first.flops_per_s > 1e8
    monkeypatch.setattr(peak, "_measure", lambda *_: 5e9)
    assert device_peak(CPU, "fp32", tmp_path) == first
    assert str(device_peak(CPU, "bf16", tmp_path)) == "5 GFLOP/s measured"
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert device_peak(CPU, "fp32", tmp_path) == Peak(5e9, "measured")


def test_a_torn_file_is_measured_again_and_no_folder_is_no_error(tmp_path, monkeypatch):
    monkeypatch.setattr(peak, "_measure", lambda *_: 7e9)
    device_peak(CPU, "fp32", tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_text('{"flops_per_s": 1')
    assert device_peak(CPU, "fp32", tmp_path) == Peak(7e9, "measured")
    assert file.read_text() == '{"flops_per_s": 7000000000.0, "source": "measured"}'
    assert device_peak(CPU, "fp32", None) == Peak(7e9, "measured")


def test_a_measurement_draws_nothing_from_the_default_generator(monkeypatch):
    monkeypatch.setattr(peak, "MEASURE_S", 0.0)
    before = torch.get_rng_state()
    device_peak(CPU, "fp32", None)
    assert torch.equal(before, torch.get_rng_state())
