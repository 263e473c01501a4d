"""Frozen parameters: none gets a gradient, all others those of the unpartitioned model, under every schedule."""

import pytest
import torch
from torch import nn

from launch.backends.processes import run_processes
from suite.errors import SettingError
from suite.pipeline.model.layers import check_frozen, structure_key
from suite.pipeline.model.topology import RankCoord
from suite.pipeline.runtime.weight_grad import DeferrableLinear, WeightGradStore, with_deferrable_linears
from suite.pipeline.schedule.config import ScheduleConfig
from suite.pipeline.schedule.remat import UNLIMITED
from tests.marks import slow_but_for
from tests.suite.pipeline.build import build, join, mini_batch, unpartitioned
from tests.suite.pipeline.freezing import FREEZES, freeze, frozen_toy
from tests.suite.pipeline.toy import SumLoss, toy_batch, toy_layers

SCHEDULE_CONFIGS = {
    1: (
        ScheduleConfig("fill_drain", (1,)),
        ScheduleConfig("1f1b", (0,)),
        ScheduleConfig("zero_bubble", (1,)),
        ScheduleConfig("zero_bubble", (UNLIMITED,)),
    ),
    2: (ScheduleConfig("interleaved", (1,), 2), ScheduleConfig("zero_bubble", (UNLIMITED,), 2)),
}
"""By cells a stage."""


def compare(rank: int, world: int, rendezvous: str, virtual_stages: int):
    """Returns, for each case and parameter of this stage, how far its gradient is off; None where it has none."""
    join(rank, world, rendezvous)
    found = []
    for name in FREEZES:
        layers = frozen_toy(name, torch.float64)
        for splits in (False, True):
            schedule_configs = [
                schedule_config
                for schedule_config in SCHEDULE_CONFIGS[virtual_stages]
                if schedule_config.defers_weight_grads is splits
            ]
            executor, ties, named, _ = build(RankCoord(rank, world, 1), layers, SumLoss(), schedule_configs[0])
            for step, schedule_config in enumerate(schedule_configs):
                batch = mini_batch(*toy_batch(7, step), 3)
                executor.schedule_config = schedule_config
                for parameter in named.values():
                    parameter.grad = None
                sums = executor.train(batch, step)
                ties.sum_gradients()
                objective, expected = unpartitioned(layers, SumLoss(), batch, step)
                case = (name, str(schedule_config))
                found += [(*case, key, _off(parameter.grad, expected[key])) for key, parameter in named.items()]
                if executor.coord.has_loss:
                    found.append((*case, "objective", abs(sums.objective - objective)))
    return found


def _off(gradient, wanted):
    return None if gradient is None else float((gradient - wanted).abs().max())


@pytest.mark.parametrize(
    ("stages", "virtual_stages"), slow_but_for([(2, 1), (3, 2)], [(1, 1), (2, 1), (4, 1), (2, 2), (3, 2)])
)
def test_frozen_parameters_get_no_gradient_and_all_others_the_right_one(stages, virtual_stages):
    found = [case for results in run_processes(compare, stages, virtual_stages) for case in results]
    parameters = sum(1 for layer in toy_layers() for _ in layer.parameters())
    assert len(found) == (parameters + 1) * len(FREEZES) * len(SCHEDULE_CONFIGS[virtual_stages])
    for name in FREEZES:
        frozen = {
            (index, own)
            for index, layer in enumerate(frozen_toy(name, torch.float64))
            for own, parameter in layer.named_parameters()
            if not parameter.requires_grad
        }
        mine = [case for case in found if case[0] == name]
        assert {case[2] for case in mine if case[3] is None} - {(0, "idle")} == frozen - {(0, "idle")}, name
        wrong = [case for case in mine if case[3] is not None and not case[3] <= 1e-11]
        assert not wrong, wrong[:5]


def test_a_frozen_layer_has_another_structure():
    blocks = [layer for layer in toy_layers() if type(layer).__name__ == "Block"]
    assert structure_key(blocks[0]) == structure_key(blocks[1])
    assert structure_key(freeze(blocks, (1,))[0]) != structure_key(blocks[1])
    assert structure_key(freeze(blocks, ((0, "mix.bias"),))[0]) != structure_key(blocks[2])


@pytest.mark.parametrize("frozen", ["0.weight", "0.bias", "3.weight", "3.bias"])
def test_of_a_split_linear_only_what_is_not_frozen_gets_a_gradient(frozen):
    torch.manual_seed(3)
    layer = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Tanh(), nn.Linear(7, 4)).double()
    layer.get_parameter(frozen).requires_grad_(False)
    x = torch.randn(3, 5, dtype=torch.float64)
    layer(x).square().sum().backward()
    wanted = {name: p.grad for name, p in layer.named_parameters()}
    layer.zero_grad()
    split = with_deferrable_linears(layer)
    assert sum(isinstance(module, DeferrableLinear) for module in split) == (2 if frozen.endswith("bias") else 1)
    for grad in WeightGradStore(split).run_deferred(lambda: split(x).square().sum().backward()):
        grad.add()
    found = {name: p.grad for name, p in layer.named_parameters()}
    assert wanted[frozen] is found[frozen] is None
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def test_a_tie_that_is_frozen_in_part_and_a_model_that_is_frozen_whole_are_refused():
    layers = toy_layers()
    layers[3].table.requires_grad_(False)
    with pytest.raises(SettingError, match=r"2 layers share .* 'words', .* some of them alone \(layer 3, table\)"):
        check_frozen(layers)
    for layer in layers:
        layer.requires_grad_(False)
    with pytest.raises(SettingError, match="all 13 parameters of the model are frozen"):
        check_frozen(layers)
