"""``gpipe plan`` refuses what no run could begin with."""

import pytest

from launch.planning.command import make_named
from suite.errors import DataError


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("t12_400m", "text.corpus=./missing"),
        ("t12_400m", "text.corpus=~/missing"),
        ("transformer_13", "text.corpus=missing/documents"),
        ("amoebanet_fashion", "images.source=/missing/images"),
        ("amoebanet_18x208", "images.source=./missing"),
    ],
)
def test_a_folder_that_does_not_exist_is_refused_before_planning(name, setting):
    with pytest.raises(DataError, match=setting.partition("=")[2]):
        make_named(name, "4xH100", "auto", setting, print)
