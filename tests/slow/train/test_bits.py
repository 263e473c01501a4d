"""Weights are the same bits for every K, and for every schedule that adds micro-batches in the same order."""

import pytest
import torch

from models.fused_norm import summed_norm_gradients
from suite import device
from tests.slow.bits import CASES, weights_after


@pytest.mark.parametrize("compiles", [False, True])
def test_weights_depend_on_the_order_of_sums_alone(compiles):
    found: dict[bool, set[str]] = {True: set(), False: set()}
    for stages, config in CASES:
        found[config.schedule == "fill_drain"].add(weights_after(stages, config, compiles=compiles))
    assert len(found[True]) == len(found[False]) == 1
    assert len(found[True] | found[False] | {weights_after(*CASES[0], steps=0)}) == 3


def test_compiled_sums_over_rows_do_not_depend_on_the_first_number_of_rows(monkeypatch):
    """A resumed run may begin with another one."""
    monkeypatch.setattr(device, "COMPILES", ("cpu",))
    monkeypatch.setattr(torch._inductor.config, "force_disable_caches", True)

    def gradients(rows):
        torch.manual_seed(rows)
        gradient, total_gradient, total = torch.randn(3, rows, 64)
        mean, scale = total.mean(1, keepdim=True), total.std(1, keepdim=True)
        return summed_norm_gradients(gradient, total_gradient, total, mean, scale, weight=torch.ones(64))

    found = []
    for first in (7, 4000):
        torch._dynamo.reset()
        gradients(first)
        found.append(gradients(1500))
    assert all(map(torch.equal, *found))
