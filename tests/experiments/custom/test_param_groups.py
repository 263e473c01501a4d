"""What ``param_groups`` of a TrainSpec may return, and what is said of anything else."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from experiments.custom.experiment import find_custom
from experiments.custom.spec_model import update_factors
from suite import TrainSpec
from suite.errors import SettingError


def spec():
    x = torch.zeros(4, 3)
    return TrainSpec(
        layers=nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)), loss=nn.MSELoss(), train=TensorDataset(x, x),
        batch_size=4,
    )  # fmt: skip


def wrong_for_norms():
    return replace(spec(), param_groups=lambda name, parameter: 1.0 if name == "1.weight" else (0.5, 0.0))


def test_without_it_all_parameters_are_updated_alike():
    assert update_factors(spec(), "0.weight") == (1.0, 1.0)


def test_it_sees_the_name_and_the_parameter_itself():
    plain = spec()
    own = plain.layers[0].weight
    grouped = replace(plain, param_groups=lambda name, p: (0.5 if name == "0.weight" and p is own else 1, p.ndim > 1))
    assert update_factors(grouped, "0.weight") == (0.5, 1.0)
    assert update_factors(grouped, "0.bias") == (1.0, 0.0)


@pytest.mark.parametrize("found", [None, 1.0, (1.0,), (1.0, 1.0, 1.0), (1.0, -0.5), (float("nan"), 1.0), ("1", 1.0)])
def test_anything_but_two_factors_is_refused(found):
    with pytest.raises(SettingError, match=r"returned .* for 0.weight; return the factors of its learning rate and"):
        update_factors(replace(spec(), param_groups=lambda name, parameter: found), "0.weight")


def test_a_function_that_fails_is_named():
    with pytest.raises(SettingError, match=r"param_groups failed for 0.weight: KeyError: '0.weight'"):
        update_factors(replace(spec(), param_groups=lambda name, parameter: {}[name]), "0.weight")


def test_what_is_wrong_is_refused_before_workers_start():
    (error,) = find_custom(f"{__file__}:wrong_for_norms").trial_errors()
    assert error.startswith("param_groups returned 1.0 for 1.weight; ")
