"""Weights are the same bits for every K, and for every schedule that adds micro-batches in the same order."""

import pytest
import torch

from models.fused_norm import summed_norm, summed_norm_gradients
from suite import device
from suite.device import fused
from tests.slow.bits import CASES, weights_after


@pytest.mark.parametrize("compiles", [False, True])
def test_weights_depend_on_the_order_of_sums_alone(compiles):
    found: dict[bool, set[str]] = {True: set(), False: set()}
    for stages, config in CASES:
        found[config.schedule == "fill_drain"].add(weights_after(stages, config, compiles=compiles))
    assert len(found[True]) == len(found[False]) == 1
    assert len(found[True] | found[False] | {weights_after(*CASES[0], steps=0)}) == 3


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 2e-2)])
def test_compiled_norms_are_the_plain_ones_whatever_number_of_rows_comes_first(monkeypatch, tmp_path, dtype, tolerance):
    """A resumed run may begin with another one."""
    monkeypatch.setattr(device, "COMPILES", ("cpu",))
    found = []
    for first in (7, 4000):
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / str(first)))
        norm, gradients = (fused(of.__wrapped__) for of in (summed_norm, summed_norm_gradients))
        computed(norm, gradients, first, dtype)
        for rows in (2, 7, 1500):
            own, expected = computed(norm, gradients, rows, dtype), computed(PLAIN[0], PLAIN[1], rows, dtype)
            for one, plain in zip(own, expected, strict=True):
                assert one.dtype == plain.dtype
                torch.testing.assert_close(one.float(), plain.float(), rtol=tolerance, atol=tolerance * rows**0.5)
            found.append(own)
    assert all(map(torch.equal, sum(found[:3], ()), sum(found[3:], ())))


PLAIN = summed_norm.__wrapped__, summed_norm_gradients.__wrapped__


def computed(norm, gradients, rows, dtype):
    """Returns what both functions compute of random rows."""
    torch.manual_seed(rows)
    x, branch, gradient, total_gradient = torch.randn(4, rows, 64).to(dtype)
    weight, bias = torch.randn(2, 64)
    total, normed, mean, scale = norm(x, branch, weight=weight, bias=bias, eps=1e-5, dtype=dtype)
    return total, normed, *gradients(gradient, total_gradient, total, mean, scale, weight=weight)
