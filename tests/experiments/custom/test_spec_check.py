"""Faults of a TrainSpec that are found before any layer runs, in the words of its author."""

import pytest
import torch
from torch import nn

from experiments.custom.spec_check import check_functions, layers_of
from suite import TrainSpec
from suite.errors import SettingError


def with_names(**names):
    layer = nn.Linear(4, 4)
    vars(layer).update(names)
    return layer


def spec(layers, **fields):
    return TrainSpec(layers=layers, train=[], **{"loss": nn.MSELoss(), **fields})


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        (nn.ModuleDict({"first": nn.ReLU(), "second": nn.ReLU()}),
         "layers is one ModuleDict, which no pipeline can cut; give a list of layers, each of which takes what the one "
         "before returns, such as [model.first, model.second]"),
        (nn.Linear(4, 4), "layers is one Linear, which no pipeline can cut; give a list of layers, each of which takes "
                          "what the one before returns, such as [first, second]"),
        (None, "layers is a NoneType; give a list of modules or an nn.Sequential"),
        ({"a": nn.ReLU()}, "layers is a dict; give a list of modules or an nn.Sequential"),
        ({nn.ReLU()}, "layers is a set; give a list of modules or an nn.Sequential"),
        (torch.compile(nn.Sequential(nn.ReLU()), backend="eager"),  # importing the default one takes seconds
         "layers is compiled by torch.compile, which cannot be cut; give the layers themselves"),
        ([], "the TrainSpec has no layers; give a list of modules or an nn.Sequential"),
        ([nn.ReLU], "layer 0 is the class ReLU; make one: ReLU(...)"),
        ([nn.ReLU(), torch.relu], "layer 1 is a builtin_function_or_method; every layer must be an nn.Module"),
        ([torch.compile(nn.Linear(4, 4))], "layer 0 (OptimizedModule) is compiled by torch.compile, which cannot be "
                                           "copied to a stage; give the module itself"),
        ([nn.Sequential(nn.DataParallel(nn.ReLU()))], "layer 0 (Sequential) is a module of DataParallel; "
                                                      "pipeline.replicas trains copies; give the module itself"),
        ([nn.LazyLinear(3)], "layer 0 (LazyLinear) has a LazyLinear without shapes; give its sizes, or run the model "
                             "once yourself"),
        ([with_names(gpipe_stashes="skip")], "layer 0 (Linear) has gpipe_stashes = 'skip'; write a tuple of names, "
                                             'such as gpipe_stashes = ("skip",)'),
        ([with_names(gpipe_pops=(1,))], "layer 0 (Linear) has gpipe_pops = (1,); write a tuple of names, such as "
                                        'gpipe_pops = ("skip",)'),
        ([with_names(gpipe_pops=("a",))], "the layers' skips do not match: a is popped by layer 0 and stashed by none; "
                                          "each name needs one layer that stashes it and a later one that pops it"),
    ],
)  # fmt: skip
def test_layers_that_are_none_are_named(layers, said):
    with pytest.raises(SettingError) as error:
        layers_of(spec(layers))
    assert str(error.value) == said


@pytest.mark.parametrize(
    "layers", [nn.Sequential(nn.ReLU()), nn.ModuleList([nn.ReLU()]), (nn.ReLU(),), iter([nn.ReLU()])]
)
def test_any_sequence_of_modules_is_a_list_of_layers(layers):
    (layer,) = layers_of(spec(layers))
    assert isinstance(layer, nn.ReLU)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"loss": nn.CrossEntropyLoss}, "loss is the class CrossEntropyLoss; make one: CrossEntropyLoss()"),
        ({"loss": None}, "loss is a NoneType; give a function or a module, such as nn.MSELoss()"),
        ({"metric": "accuracy"}, "metric is a str; give a function, or a dict of them by name"),
        ({"on_step": 3}, "on_step is a int; give a function"),
        ({"prefetch": "yes"}, "prefetch is a str; give True or False"),
        ({"units": 3}, "units is a int; give a function"),
    ],
)
def test_functions_that_cannot_be_called_are_named(fields, said):
    with pytest.raises(SettingError) as error:
        check_functions(spec([nn.ReLU()], **fields))
    assert str(error.value) == said
