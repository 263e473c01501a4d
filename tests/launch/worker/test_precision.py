"""bf16 where the processor has no instructions for it."""

import pytest
import torch

from experiments.base.cluster import Cluster
from experiments.registry import resolve
from launch.worker import precision
from launch.worker.devices import multiplies_bf16
from launch.worker.precision import with_available_precision
from suite.pipeline.planning.devices import GIB

CORES = Cluster(2, GIB, "cpu")


def chosen(settings):
    return resolve("t12_400m", "laptop", CORES, settings)[0]


@pytest.mark.parametrize("cluster", [CORES, Cluster(2, GIB, "gpu", name="Tesla V100", has_bf16=False)], ids=str)
def test_a_device_without_bf16_trains_in_fp32_and_says_it_once(monkeypatch, cluster):
    monkeypatch.setattr(precision, "multiplies_bf16", lambda: cluster.kind == "gpu")
    lines = []
    found = with_available_precision(chosen("optimizer.precision=bf16"), cluster, lines.append)
    assert found.optimizer == chosen("optimizer.precision=fp32").optimizer
    assert len(lines) == 1
    assert (cluster.name or "avx512_bf16 or amx_bf16") in lines[0]


@pytest.mark.parametrize(
    ("settings", "cluster", "has"),
    [
        ("optimizer.precision=bf16", CORES, True),
        ("optimizer.precision=bf16", Cluster(2, GIB, "gpu", name="NVIDIA A100", has_bf16=True), False),
        ("optimizer.precision=fp32", CORES, False),
    ],
)
def test_other_runs_keep_their_precision(monkeypatch, settings, cluster, has):
    monkeypatch.setattr(precision, "multiplies_bf16", lambda: has)
    lines = []
    assert with_available_precision(chosen(settings), cluster, lines.append) == chosen(settings)
    assert lines == []


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
