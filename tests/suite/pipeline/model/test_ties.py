"""Copies of a tied parameter are summed part by part: the same bits, in little memory."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from launch.backends.processes import run_processes
from suite.errors import SettingError
from suite.pipeline.model import ties as ties_module
from suite.pipeline.model.layers import check_frozen
from suite.pipeline.model.ties import TiedCopy, TiedParameters
from suite.pipeline.model.topology import RankCoord
from suite.pipeline.planning.memory_tracker import tracked_memory
from tests.suite.pipeline.toy import toy_layers

COPIES = [TiedCopy(0, 0, "weight"), TiedCopy(0, 3, "weight"), TiedCopy(0, 7, "weight")]


def tied(values: int) -> tuple[TiedParameters, list[nn.Parameter]]:
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.zeros(values // 8, 8)) for _ in COPIES]
    for parameter in parameters:
        parameter.grad = torch.randn(values // 8, 8, generator=generator)
    named = {(copy.layer, copy.name): parameter for copy, parameter in zip(COPIES, parameters, strict=True)}
    return TiedParameters({"embedding": COPIES}, RankCoord(0, 1, 1), named, 10.0), parameters


@pytest.mark.parametrize("values_at_once", [7, 1000])
def test_the_sum_of_parts_has_the_bits_of_the_sum_in_layer_order(values_at_once, monkeypatch):
    monkeypatch.setattr(ties_module, "VALUES_AT_ONCE", values_at_once)
    ties, parameters = tied(64)
    first, second, third = (parameter.grad.clone() for parameter in parameters)
    ties.sum_gradients()
    assert all(torch.equal(parameter.grad, first + second + third) for parameter in parameters)


def test_every_copy_gets_the_values_of_the_first(monkeypatch):
    monkeypatch.setattr(ties_module, "VALUES_AT_ONCE", 7)
    ties, parameters = tied(64)
    with torch.no_grad():
        for number, parameter in enumerate(parameters):
            parameter += number + torch.arange(64).view(8, 8)
    ties.broadcast_first_copy()
    assert all(torch.equal(parameter, torch.arange(64.0).view(8, 8)) for parameter in parameters)


def test_the_first_copy_alone_counts():
    ties, _ = tied(64)
    assert [ties.first_copy(copy.layer, "weight") for copy in COPIES] == [(0, "weight")] * 3
    assert [ties.is_first_copy(copy.layer, "weight") for copy in COPIES] == [True, False, False]
    assert ties.first_copy(3, "bias") == (3, "bias")


def test_the_sum_needs_three_parts_of_memory_whatever_the_parameters_size(monkeypatch):
    monkeypatch.setattr(ties_module, "VALUES_AT_ONCE", 1 << 12)
    ties, _ = tied(1 << 18)
    with tracked_memory(torch.device("cpu")) as memory:
        ties.sum_gradients()
    assert memory.peak <= 3 * 4 << 12


def two_stages(rank, world, rendezvous):
    """Copies of layers 0 and 7 on stage 0, of layer 3 on stage 1; returns the broadcast values and the sum."""
    ties_module.VALUES_AT_ONCE = 7  # several parts, the last one shorter
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world)
    copies = [TiedCopy(0, 0, "weight"), TiedCopy(1, 3, "weight"), TiedCopy(0, 7, "weight")]
    named = {}
    for copy in copies:
        parameter = nn.Parameter(torch.full((8, 8), float(copy.layer)))
        parameter.grad = torch.randn(8, 8, generator=torch.Generator().manual_seed(copy.layer))
        if copy.stage == rank:
            named[copy.layer, copy.name] = parameter
    ties = TiedParameters({"embedding": copies}, RankCoord(rank, 2, 1), named, 30.0)
    ties.broadcast_first_copy()
    ties.sum_gradients()
    dist.destroy_process_group()
    return [(parameter.detach().numpy(), parameter.grad.numpy()) for parameter in named.values()]


def test_copies_on_two_stages_have_the_same_sum_part_by_part():
    first, second, third = (torch.randn(8, 8, generator=torch.Generator().manual_seed(n)) for n in (0, 3, 7))
    stages = run_processes(two_stages, 2, deadline_s=120)
    assert [len(stage) for stage in stages] == [2, 1]
    for value, gradient in stages[0] + stages[1]:
        assert not value.any()  # the first copy's
        assert torch.equal(torch.from_numpy(gradient), first + second + third)


def test_a_tie_that_is_frozen_in_part_and_a_model_that_is_frozen_whole_are_refused():
    layers = toy_layers()
    layers[3].table.requires_grad_(False)
    with pytest.raises(SettingError, match=r"2 layers share .* 'words', .* some of them alone \(layer 3, table\)"):
        check_frozen(layers)
    for layer in layers:
        layer.requires_grad_(False)
    with pytest.raises(SettingError, match="all 13 parameters of the model are frozen"):
        check_frozen(layers)
