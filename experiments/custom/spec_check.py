"""What is wrong with the fields of a TrainSpec, before any layer runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from suite.errors import SettingError
from suite.pipeline.runtime.skip import find_skips
from suite.train_spec import TrainSpec

WRAPPERS = {
    torch.jit.ScriptModule: "of TorchScript, which cannot be copied to a stage",
    nn.DataParallel: "of DataParallel; pipeline.replicas trains copies",
    DistributedDataParallel: "of DistributedDataParallel; pipeline.replicas trains copies",
}
"""Modules around a user's own that no stage can hold, and what they are."""

ADVICE = {"loss": "a function or a module, such as nn.MSELoss()", "metric": "a function, or a dict of them by name"}


def check_functions(spec: TrainSpec) -> None:
    """Raises SettingError for functions that cannot be called, and a ``prefetch`` that is neither True nor False.
    ``metric`` may be a dict of functions."""
    for name in ("loss", "metric", "units", "collate", "on_step", "param_groups"):
        value = getattr(spec, name)
        if name == "metric" and isinstance(value, Mapping):
            continue
        if isinstance(value, type) and issubclass(value, nn.Module):
            raise SettingError(f"{name} is the class {value.__name__}; make one: {value.__name__}()")
        if not callable(value) and (value is not None or name == "loss"):
            raise SettingError(f"{name} is a {type(value).__name__}; give {ADVICE.get(name, 'a function')}")
    if not isinstance(spec.prefetch, bool):
        raise SettingError(f"prefetch is a {type(spec.prefetch).__name__}; give True or False")


def layers_of(spec: TrainSpec) -> list[nn.Module]:
    """Returns the spec's layers. Raises SettingError when it has none, something else among them, or skips that do not
    match."""
    given = spec.layers
    if hasattr(given, "_orig_mod"):
        raise SettingError("layers is compiled by torch.compile, which cannot be cut; give the layers themselves")
    if isinstance(given, nn.Module) and not isinstance(given, nn.Sequential | nn.ModuleList):
        children = ", ".join(f"model.{name}" for name, _ in given.named_children()) or "first, second"
        raise SettingError(
            f"layers is one {type(given).__name__}, which no pipeline can cut; give a list of layers, each of which "
            f"takes what the one before returns, such as [{children}]"
        )
    if not isinstance(given, Iterable) or isinstance(given, str | dict | set):
        raise SettingError(f"layers is a {type(given).__name__}; give a list of modules or an nn.Sequential")
    layers = list(given)
    if not layers:
        raise SettingError("the TrainSpec has no layers; give a list of modules or an nn.Sequential")
    for index, layer in enumerate(layers):
        if isinstance(layer, type) and issubclass(layer, nn.Module):
            raise SettingError(f"layer {index} is the class {layer.__name__}; make one: {layer.__name__}(...)")
        if not isinstance(layer, nn.Module):
            raise SettingError(f"layer {index} is a {type(layer).__name__}; every layer must be an nn.Module")
        if fault := _fault_of(layer):
            raise SettingError(f"layer {index} ({type(layer).__name__}) {fault}")
    find_skips(layers)
    return layers


def _fault_of(layer: nn.Module) -> str:
    for name in ("gpipe_stashes", "gpipe_pops"):
        value = getattr(layer, name, ())
        if not isinstance(value, tuple | list) or not all(isinstance(each, str) for each in value):
            return f'has {name} = {value!r}; write a tuple of names, such as {name} = ("skip",)'
    for module in layer.modules():
        if hasattr(module, "_orig_mod"):
            return "is compiled by torch.compile, which cannot be copied to a stage; give the module itself"
        for wrapper, what in WRAPPERS.items():
            if isinstance(module, wrapper):
                return f"is a module {what}; give the module itself"
        if isinstance(module, nn.modules.lazy.LazyModuleMixin) and module.has_uninitialized_params():
            return f"has a {type(module).__name__} without shapes; give its sizes, or run the model once yourself"
    return ""
