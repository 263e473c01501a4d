"""Layers of a TrainSpec: initial values, ties, and errors of a layer that cannot run in a pipeline."""

import pytest
import torch
from torch import nn

from experiments.custom.experiment import build
from experiments.custom.held_tensors import check_held
from experiments.custom.layer_check import find_refusal
from experiments.custom.layers import on_meta
from experiments.custom.loss import SummedLoss
from suite import TrainSpec
from suite.errors import SettingError
from suite.pipeline.model.layers import materialize, structure_key
from suite.pipeline.planning.devices import DEVICES
from suite.pipeline.planning.estimate import estimate
from suite.pipeline.planning.sample import MicroBatch
from suite.settings import OptimizerSettings
from tests.experiments.custom.models import Lambda

CPU = torch.device("cpu")


def mean(outputs, targets):
    return (outputs - targets).square().sum(), outputs.sum().detach()


def faults(*layers, loss=mean):
    made = [on_meta(layer) for layer in layers]
    try:
        return find_refusal(made, loss, (torch.ones(2, 3),), (torch.ones(2, 3),))
    except SettingError as fault:
        return str(fault)


def test_a_layer_begins_with_the_values_it_was_built_with():
    layer = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm2d(3))
    layer[1].running_mean.fill_(5)
    bare = on_meta(layer)
    assert all(tensor.is_meta for tensor in (*bare.parameters(), *bare.buffers()))
    assert not any(tensor.is_meta for tensor in layer.parameters())
    made = materialize(bare, 1, CPU)
    assert all(made.state_dict()[name].equal(value) for name, value in layer.state_dict().items())


def test_a_layer_on_the_meta_device_is_initialised_by_its_modules():
    with torch.device("meta"):
        bare = on_meta(nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.LayerNorm(3)))
    first, second, other = (materialize(bare, seed, CPU) for seed in (1, 1, 2))
    assert first[0].weight.equal(second[0].weight)
    assert not first[0].weight.equal(other[0].weight)
    assert first[2].weight.equal(torch.ones(3))


def test_a_parameter_that_nothing_initialises_is_named_before_workers_start():
    class Sub(nn.Linear):
        """Its inherited reset_parameters leaves the norm alone."""

        def __init__(self):
            super().__init__(3, 3)
            self.norm = nn.LayerNorm(3)

    bare = nn.Sequential(nn.Linear(3, 3))
    bare.register_parameter("token", nn.Parameter(torch.ones(3)))
    with torch.device("meta"):
        assert "layer 0 (Sub): its norm.weight has no values: a layer on the meta device needs" in faults(Sub())
    assert "layer 0 (Sequential): its token has no values" in faults(bare.to("meta"))


def test_the_topmost_reset_of_a_branch_initialises_it():
    class Sevens(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def reset_parameters(self):
            nn.init.constant_(self.linear.weight, 7)
            nn.init.zeros_(self.linear.bias)

    with torch.device("meta"):
        made = materialize(on_meta(nn.Sequential(Sevens())), 1, CPU)
    assert made[0].linear.weight.equal(torch.full((3, 3), 7.0))


def test_a_layer_that_returns_integers_alone_needs_no_gradient():
    assert not faults(nn.Sequential(nn.Linear(3, 3), Lambda(lambda x: x.argmax(1))), nn.Embedding(3, 3))


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (
            [nn.Linear(3, 4), nn.Linear(5, 3)],
            "layer 1 (Linear) cannot take what layer 0 (Linear) returns, float32 (2, 4): RuntimeError: mat1 and mat2",
        ),
        ([nn.Linear(4, 3)], "layer 0 (Linear) cannot take the inputs, float32 (2, 3)"),
        ([Lambda(lambda x: (x, x)), nn.Linear(3, 3)], "layer 1 (Linear) cannot take what layer 0 (Lambda) returns"),
        ([nn.Linear(3, 4)], "the loss cannot take float32 (2, 4) with targets float32 (2, 3): RuntimeError"),
        ([nn.Linear(3, 3).bfloat16()], "layer 0 (Linear) trains weight in bfloat16, where most updates round to"),
        ([nn.Linear(3, 3), Lambda(torch.detach)], "nothing that the last layer returns depends on a trained parameter"),
    ],
)
def test_layers_that_cannot_run_or_be_trained_are_named_before_workers_start(layers, message):
    assert message in faults(*layers)
    assert "\n" not in faults(*layers)


def test_a_loss_that_uses_a_layer_is_refused():
    first = nn.Linear(3, 3)
    spec = TrainSpec(layers=[first], loss=lambda out, y: (out - y).sum() + first.weight.abs().sum(), train=[])
    with pytest.raises(SettingError, match="loss uses the Linear of layer 0 by first in a function"):
        check_held(spec)


def hard_rows(outputs, targets):
    errors = (outputs - targets).square().sum(1)
    return errors[errors > errors.mean()].mean(), outputs.sum().detach()


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda outputs, targets: (outputs.sum(1), outputs.sum()), "the loss returns a tensor of shape (2,)"),
        (hard_rows, "the loss does not run on tensors without values"),
        (lambda outputs, targets: ((outputs.argmax(1) != 0).float().mean(), outputs.sum()), "the loss has no gradient"),
    ],
)
def test_a_loss_must_be_one_number_with_a_gradient_whose_shapes_do_not_depend_on_values(loss, message):
    assert message in faults(nn.Linear(3, 3), loss=loss)


@pytest.mark.parametrize(
    "loss", [nn.CrossEntropyLoss(), nn.CrossEntropyLoss(torch.ones(3)), nn.functional.cross_entropy]
)
def test_costs_are_estimated_without_values(loss):
    """A plan runs the loss on tensors that have shapes alone."""

    def accuracy(scores, labels):
        return (scores.argmax(1) == labels).float().mean().item()

    rows = [(torch.randn(3), row % 3) for row in range(8)]
    layers, summed = build(TrainSpec(layers=[nn.Linear(3, 3)], loss=loss, metric=accuracy, train=rows))
    data = MicroBatch((torch.randn(4, 3),), (torch.tensor([0, 1, -100, 2]),))
    (cost,) = estimate(layers, summed, data, DEVICES["V100"], OptimizerSettings())
    assert cost.forward_s > 0


class Configuration:
    """What every block of a model of transformers holds."""


def test_layers_that_hold_one_configuration_are_equal_also_on_the_meta_device():
    class Block(nn.Module):
        def __init__(self, configuration):
            super().__init__()
            self.configuration, self.linear = configuration, nn.Linear(3, 3)

        def forward(self, x):
            return self.linear(x)

    one, other = Configuration(), Configuration()
    layers, _ = build(
        TrainSpec(layers=[Block(one), Block(one), Block(other)], loss=nn.MSELoss(), train=[(torch.ones(3),) * 2])
    )
    keys = [structure_key(layer) for layer in layers]
    assert keys[0] == keys[1] != keys[2]
    assert layers[0].configuration is not one, "a copy, as of all that a layer holds"
    assert len({id(layer.linear.weight) for layer in layers}) == 3


@pytest.mark.parametrize("metric", [lambda out, y: None, lambda out, y: "x", lambda out, y: {}["x"]])
def test_a_metric_that_fails_is_named(metric):
    data = [(torch.ones(3), torch.ones(3))] * 4
    spec = TrainSpec(layers=[nn.Linear(3, 3)], loss=nn.MSELoss(), train=data, metric={"hits": metric})
    with pytest.raises(SettingError, match="the metric hits fails or returns no number"):
        SummedLoss(spec, 1)(torch.ones(2, 3), torch.ones(2, 3))
