"""Which layers ``gpipe check`` keeps of a model that is too large."""

import re

import pytest
import torch
from rich.console import Console
from torch import nn

from experiments.base.cluster import Cluster
from experiments.custom.experiment import find_custom
from experiments.registry import read_experiment
from launch.diff import plain_training, short_training, shortening
from launch.diff.check import _suits
from suite import TrainSpec
from suite.errors import PlacementError
from suite.settings import PipelineSettings

ONE = PipelineSettings(micro_batches=4)
TWO = PipelineSettings(replicas=2, micro_batches=2)


def wide(layers=40):
    """Its weights, gradients and optimizer take a MiB a layer."""
    x = torch.randn(16, 256, generator=torch.Generator().manual_seed(3))
    middle = [nn.Linear(256, 256) for _ in range(layers - 2)]
    return TrainSpec(
        layers=[nn.Linear(256, 256, bias=False), *middle, nn.Linear(256, 256, bias=False)], loss=nn.MSELoss(),
        train=list(zip(x, x, strict=True)), batch_size=8, micro_batches=4,
    )  # fmt: skip


def widest():
    """No two layers in a row are equal."""
    return wide(3)


@pytest.fixture
def machine(monkeypatch):
    """Sets the memory of two cores in MiB."""

    def set_memory(mib):
        for module in (plain_training, short_training):
            monkeypatch.setattr(module, "this_machine", lambda: Cluster(2, (mib << 20) // 2, "cpu"))

    return set_memory


def shortened(name, *shapes):
    return shortening.shortened_to_fit(find_custom(f"{__file__}:{name}"), lambda layers: shapes, Console(quiet=True))


@pytest.mark.parametrize("mib", [16, 24, 32])
@pytest.mark.parametrize("shapes", [(ONE,), (ONE, TWO)])
def test_as_many_layers_are_kept_as_fit_in_all_shapes(machine, mib, shapes):
    machine(mib)
    short = shortened("wide", *shapes)
    most = short.list_length - 2
    assert short.kept_layers == (0, *range(1, most + 1), 39)
    more = short.model_copy(update={"kept_layers": (*range(most + 2), 39)})
    fits = [not any(shortening.memory_fault(each.with_pipeline(shape)) for shape in shapes) for each in (short, more)]
    assert fits == [True, False]
    assert len(short.build()[0]) == short.list_length
    assert short.shrunk == (f"layers 40 -> {short.list_length}",)
    assert read_experiment(short.to_toml()) == short
    assert short.key() != more.key()


def test_replicas_that_share_the_memory_have_fewer_layers(machine):
    machine(32)
    alone, beside = (shortened("wide", *shapes).list_length for shapes in ((ONE,), (ONE, TWO)))
    assert 4 <= beside < alone < 32


def test_a_model_that_fits_in_plain_torch_stays_whole(machine):
    machine(42)
    experiment = find_custom(f"{__file__}:wide")
    assert shortened("wide", ONE) == experiment
    needs = r"needs 0\.0\d GiB"
    assert re.search(needs, shortening.memory_fault(experiment.with_pipeline(TWO)))
    machine(200)
    assert shortening.memory_fault(experiment.with_pipeline(TWO)) == ""


def test_a_fault_that_no_memory_helps_is_none_of_memory(machine):
    machine(24)
    too_many = find_custom(f"{__file__}:wide").with_pipeline(PipelineSettings(micro_batches=9))
    assert "9 micro-batches" in shortening._fault(too_many, short_training.shared_devices())
    assert shortening.memory_fault(too_many) == ""


@pytest.mark.parametrize(
    ("name", "mib", "why"),
    [("widest", 2, "no three equal layers are in a row"), ("wide", 3, "two of each row of equal layers are too many")],
)
def test_what_cannot_be_shortened_enough_is_refused(machine, name, mib, why):
    machine(mib)
    with pytest.raises(PlacementError, match=rf"where [\d,]+ parameters .*, and {why}; "):
        shortened(name, ONE)


def test_rows_are_of_equal_layers_without_a_counterpart_elsewhere():
    def linear(width, **more):
        layer = nn.Linear(width, width)
        vars(layer).update(more)
        return layer

    layers = [linear(2), linear(2), linear(3), linear(2, stashes=("a",)), linear(2, pops=("a",)), linear(2), linear(2)]
    assert shortening._rows(layers) == [[0, 1], [2], [3], [4], [5, 6]]
    tied = [linear(2, tied={"weight": "w"}), linear(2), linear(2, tied={"weight": "w"})]
    assert shortening._rows(tied) == [[0], [1], [2]]


def test_a_pipeline_of_the_user_suits_a_shortened_model_that_has_its_cells():
    cells = PipelineSettings(stages=2, layers_per_cell=(10, 30))
    deep = PipelineSettings(stages=2, schedule="zbv", virtual_stages=2)
    assert [_suits(cells, layers, 40) for layers in (40, 8)] == [True, False]
    assert [_suits(deep, layers, 40) for layers in (40, 4, 3)] == [True, True, False]
