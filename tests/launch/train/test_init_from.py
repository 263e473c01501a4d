"""Which run's weights another run can start from, as far as settings tell."""

from dataclasses import fields

from experiments.registry import find
from launch.train.command import NO_SHAPE, _model_differences


def test_a_run_may_start_from_one_of_other_rows_and_not_from_one_of_another_width():
    one = find("transformer_3")
    assert _model_differences(one, one.with_settings(f"text.length={one.text.length // 2}")) == ""
    assert "width is" in _model_differences(one, one.with_settings(f"model.width={2 * one.model.width}"))
    models = [find(name).model for name in ("transformer_3", "t12_400m", "amoebanet_imagenet")]
    assert {*NO_SHAPE} <= {field.name for model in models for field in fields(model)}
