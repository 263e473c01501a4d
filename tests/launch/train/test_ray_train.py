"""``launch.train_loop``: what it refuses. That it trains in a TorchTrainer is in tests/slow."""

import pytest

from launch.train.ray_train import train_loop
from suite.errors import SettingError


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({}, r"train_loop_config has \[\]; it takes a name"),
        ({"name": "a", "sets": ""}, r"has \['name', 'sets'\]; it takes"),
    ],
)
def test_a_wrong_config_is_refused(config, said):
    with pytest.raises(SettingError, match=said):
        train_loop(config)
