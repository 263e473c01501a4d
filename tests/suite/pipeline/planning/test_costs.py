"""Layer costs are checked as a whole: every error is reported at once."""

import math
from dataclasses import replace

import pytest

from suite.errors import SettingError
from suite.pipeline.planning.costs import LayerCost, SkipInput, check_costs
from tests.suite.pipeline.planning.costs import ZERO

GOOD = replace(ZERO, forward_s=1.0, recompute_s=1.5, backward_s=2.0, update_s=0.5, parameters=3, boundary_bytes=4)


def test_whole_costs_pass_and_zero_is_a_cost():
    check_costs([GOOD, ZERO, GOOD])
    check_costs([])


def test_all_faults_are_told_in_one_sentence():
    bad = replace(GOOD, forward_s=-1.0, backward_s=math.nan, parameters=-7)
    endless = replace(GOOD, update_s=math.inf)
    with pytest.raises(SettingError) as caught:
        check_costs([bad, GOOD, endless])
    message = str(caught.value)
    assert "layer 0 has forward_s = -1.0, backward_s = nan, parameters = -7" in message
    assert "layer 2 has update_s = inf" in message
    assert "layer 1" not in message
    assert "\n" not in message


@pytest.mark.parametrize("value", [-1, math.nan, math.inf])
def test_each_number_is_checked(value):
    for name in LayerCost.__dataclass_fields__.keys() - {"skip_inputs"}:
        with pytest.raises(SettingError, match=f"layer 1 has {name} = {value}; measure"):
            check_costs([GOOD, replace(GOOD, **{name: value})])


@pytest.mark.parametrize(
    ("popped", "fault"),
    [
        (SkipInput(1, -5, 0, False), "layer 1 has pops 0, bytes = -5"),
        (SkipInput(2, 5, 5, False), "layer 1 pops skips that were stashed 2 layers before it"),
    ],
)
def test_skips_are_checked_too(popped, fault):
    with pytest.raises(SettingError, match=fault):
        check_costs([GOOD, replace(GOOD, skip_inputs=(popped,))])
    check_costs([GOOD, replace(GOOD, skip_inputs=(SkipInput(1, 5, 5, True),))])


def test_no_layer_defers_more_than_its_backward():
    check_costs([replace(GOOD, backward_s=2.0, weight_grad_s=2.0)])
    with pytest.raises(SettingError, match=r"layer 1 defers 3\.0 s of a backward of 2\.0 s"):
        check_costs([GOOD, replace(GOOD, backward_s=2.0, weight_grad_s=3.0)])
