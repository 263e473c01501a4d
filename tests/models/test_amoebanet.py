"""AmoebaNet-D: the paper's sizes to the parameter, shapes at even and odd sizes, skips, numbers that are none."""

import pytest
import torch

from experiments.report.paper import paper_numbers
from models.amoebanet import AmoebaNetShape, layers
from suite.pipeline.model.layers import count_parameters
from suite.pipeline.runtime.boundary import CutSpec, TensorSpec
from suite.pipeline.runtime.shape_inference import ShapeInference
from suite.pipeline.runtime.skip import find_skips

TABLE = paper_numbers("table1.amoebanet")


def on_meta(shape: AmoebaNetShape):
    with torch.device("meta"):
        return layers(shape)


@pytest.mark.parametrize("at", [0, 2, 4])
def test_sizes_of_table_1_to_the_parameter(at):
    shape = AmoebaNetShape(TABLE["L"][at], TABLE["D"][at])
    made = on_meta(shape)
    assert count_parameters(made) == TABLE["parameters_derived"][at]
    assert count_parameters(made) == pytest.approx(TABLE["parameters"][at], rel=0.025)
    assert len(made) == shape.list_length


@pytest.mark.parametrize(("stem", "size", "last"), [("photographs", 479, 15), ("small", 29, 8)])
def test_sizes_are_halved_and_rounded_up(stem, size, last):
    shape = AmoebaNetShape(3, 8, classes=7, stem=stem)
    images = CutSpec((TensorSpec((2, 3, size, size), torch.float32, False),))
    cuts = ShapeInference(on_meta(shape)).infer_all(images)
    (before_scores,), (scores,) = cuts[-2].main, cuts[-1].main
    assert before_scores.shape == (2, 4 * 32, last, last)  # four states of 4D filters
    assert shape.last_size(size) == last
    assert scores.shape == (2, 7)
    assert cuts[-1].skips == ()


def test_every_cell_but_the_first_takes_the_output_of_the_layer_before_the_last():
    skips = find_skips(on_meta(AmoebaNetShape(6, 8)))
    assert [(skip.source, skip.target) for skip in skips] == [(at - 2, at) for at in range(2, 11)]


def test_fresh_weights_keep_the_signals_size():
    """Drawn, not left as they lay in memory; the scores begin near zero."""
    torch.manual_seed(0)
    made = [layer.to_empty(device="cpu") for layer in on_meta(AmoebaNetShape(3, 8, classes=5, stem="small"))]
    for layer in made:
        layer.reset_parameters()
    x = torch.randn(4, 3, 8, 8)
    first, given = made[0](x)
    assert first is given
    assert float(first.detach().std()) == pytest.approx(1.0, abs=0.1)  # a norm's output
    assert float(made[-1].scores.weight.detach().std()) == pytest.approx(0.01, rel=0.3)
    assert float(made[0].norm.weight.min()) == 1.0


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"layers": 4}, "layers\n.* multiple of 3 "),
        ({"filters": 4}, "filters must be 8 at least with this stem, not 4"),
        ({"classes": 1}, "classes\n.* greater than or equal to 2 "),
        ({"stem": "large"}, "stem\n.* 'photographs' or 'small' "),
        ({"norm_decay": 1.0}, "norm_decay\n.* less than 1 "),
    ],
)
def test_numbers_no_model_can_have_are_named(wrong, message):
    with pytest.raises(ValueError, match=message):
        AmoebaNetShape(**{"layers": 3, "filters": 8, **wrong})
