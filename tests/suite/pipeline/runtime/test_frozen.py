"""Frozen parameters: none gets a gradient, all others those of the unpartitioned model; a tie is frozen as a whole."""

from itertools import product

import pytest
import torch

from launch.backends.processes import run_processes
from suite.errors import SettingError
from suite.pipeline.model.layers import check_frozen
from suite.pipeline.model.topology import RankCoord
from suite.pipeline.schedule.config import ScheduleConfig
from suite.pipeline.schedule.remat import UNLIMITED
from tests.suite.pipeline.build import build, differences, join, mini_batch, unpartitioned
from tests.suite.pipeline.freezing import FREEZES, frozen_toy
from tests.suite.pipeline.toy import SumLoss, toy_batch, toy_layers

SCHEDULES = (ScheduleConfig("interleaved", (1,), 2), ScheduleConfig("zero_bubble", (UNLIMITED,), 2))


def compare(rank: int, world: int, rendezvous: str):
    """Returns, for each case and parameter of this stage, how far its gradient is off; None where it has none."""
    join(rank, world, rendezvous)
    found = []
    for name, (step, schedule_config) in product(FREEZES, enumerate(SCHEDULES)):
        layers, batch = frozen_toy(name, torch.float64), mini_batch(*toy_batch(7, step), 3)
        executor, ties, named, _ = build(RankCoord(rank, world, 1), layers, SumLoss(), schedule_config)
        executor.train(batch, step)
        ties.sum_gradients()
        _, expected = unpartitioned(layers, SumLoss(), batch, step)
        off = differences(named, expected)
        found += [(name, key, None if p.grad is None else off[key]) for key, p in named.items()]
    return found


def test_with_ties_frozen_parameters_get_no_gradient_and_all_others_the_right_one():
    """Without ties: ``test_random_gradients``."""
    found = [case for results in run_processes(compare, 3) for case in results]
    parameters = sum(1 for layer in toy_layers() for _ in layer.parameters())
    assert len(found) == parameters * len(FREEZES) * len(SCHEDULES)
    for name in FREEZES:
        frozen = {
            (index, own)
            for index, layer in enumerate(frozen_toy(name, torch.float64))
            for own, parameter in layer.named_parameters()
            if not parameter.requires_grad
        }
        off = [(key, difference) for case, key, difference in found if case == name]
        assert {key for key, difference in off if difference is None} - {(0, "idle")} == frozen - {(0, "idle")}, name
        assert all(difference is None or difference <= 1e-11 for _, difference in off), (name, off)


def test_a_tie_that_is_frozen_in_part_and_a_model_that_is_frozen_whole_are_refused():
    layers = toy_layers()
    layers[3].table.requires_grad_(False)
    with pytest.raises(SettingError, match=r"2 layers share .* 'words', .* some of them alone \(layer 3, table\)"):
        check_frozen(layers)
    for layer in layers:
        layer.requires_grad_(False)
    with pytest.raises(SettingError, match="all 13 parameters of the model are frozen"):
        check_frozen(layers)
