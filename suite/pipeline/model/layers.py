"""The interface of a model: a list of layers and a loss.

    layer_0, layer_1, ... layer_{L-1}, loss

A layer is a ``torch.nn.Module`` whose ``forward`` takes the outputs of the previous layer (one tensor or a tuple; ids
and masks may be among them) and returns the inputs of the next one. It also has

``reset_parameters()``
    initialises all parameters and buffers from the current random state, so a stage materializes only its layers;
``gpipe_ties`` (optional)
    ``{parameter name: tie}``: parameters with the same tie, in any layers, are one parameter to the optimizer;
``gpipe_score(loss, inputs, targets)`` (optional, of the last layer)
    returns the same as ``loss(*layer(*inputs), *targets)`` with less memory;
``gpipe_pops``, ``gpipe_stashes`` (optional)
    names of skips: tensors that bypass layers, see ``suite.pipeline.runtime.skip``;
``prefill(*inputs)``, ``decode_step(cache, *inputs)`` (optional, of the last layers of a model that generates text)
    forward on the first positions, and on one more, see ``suite.decoding.kv_cache``.

A parameter whose ``requires_grad`` is False is frozen: it has no gradient, no optimizer state and no weight decay, but
checkpoints include it.

The loss is a module too: ``loss(*outputs, *targets) -> (objective, metric)``, both *sums* over the micro-batch's
tokens. The objective is differentiated; the metric (for text: plain negative log likelihood) is only reported. A
loss with ``metric_count`` above 1 returns so many metrics as one tensor.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from suite.errors import SettingError
from suite.pipeline.model.layer_copy import Original, copied
from suite.pipeline.model.rng import seeded

Tensors = tuple[Tensor, ...]


def as_tuple(value: Tensor | Tensors) -> Tensors:
    """Returns a layer's outputs, one tensor or several, as a tuple."""
    return (value,) if isinstance(value, Tensor) else tuple(value)


def loss_of(layer: nn.Module, loss: nn.Module, inputs: Tensors, targets: Tensors) -> Tensors:
    """Runs the last layer and the loss; returns (objective, metric)."""
    score = getattr(layer, "gpipe_score", None)
    return score(loss, inputs, targets) if score else loss(*as_tuple(layer(*inputs)), *targets)


def ties_of(layer: nn.Module) -> dict[str, str]:
    """Returns ``{parameter name: tie}`` of one layer; empty when it shares none."""
    return dict(getattr(layer, "gpipe_ties", {}))


ORIGINAL = "gpipe_original"
"""The attribute by which a layer without values names the one that it was copied from (``Original``)."""

_NOT_FUNCTION = {*vars(nn.Module()), "gpipe_ties", "gpipe_pops", "gpipe_stashes", "reset_parameters", ORIGINAL}


def structure_key(layer: nn.Module) -> Hashable:
    """Returns a key that is equal for layers which compute the same function of their inputs and parameters.

    It consists of the class, plain attributes, shapes of parameters and buffers, and which parameters are frozen, of
    the layer and all its submodules. Other attributes count by identity, so different layers never get equal keys.

    A layer's author may know better: a ``gpipe_structure``, any hashable value, replaces the attributes of a layer and
    its submodules, such as a block's index or a configuration. The rest still counts.
    """
    declared = getattr(layer, "gpipe_structure", None)
    recurse = declared is not None
    named = itertools.chain(layer.named_parameters(recurse=recurse), layer.named_buffers(recurse=recurse))
    tensors = tuple((name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad) for name, tensor in named)
    skips = tuple(len(getattr(layer, names, ())) for names in ("gpipe_pops", "gpipe_stashes"))
    if declared is not None:
        return type(layer), skips, tensors, declared
    attributes = tuple(
        (name, value if _plain(value) else id(value))
        for name, value in sorted(vars(layer).items())
        if name not in _NOT_FUNCTION
    )
    children = tuple((name, structure_key(child)) for name, child in layer.named_children())
    hooks = tuple(map(id, (*layer._forward_pre_hooks.values(), *layer._forward_hooks.values())))
    return type(layer), skips, tensors, attributes, children, hooks


def _plain(value: object) -> bool:
    if isinstance(value, tuple):
        return all(map(_plain, value))
    return isinstance(value, int | float | str | bytes | torch.dtype | None)


def distinct_parameters(layers: Sequence[nn.Module]) -> Iterator[tuple[int, str, nn.Parameter]]:
    """Yields (layer index, name, parameter) in layer order; of tied parameters only the first copy."""
    seen: set[object] = set()
    for index, layer in enumerate(layers):
        ties = ties_of(layer)
        for name, parameter in layer.named_parameters():
            tie = ties.get(name, (index, name))
            if tie not in seen:
                seen.add(tie)
                yield index, name, parameter


def count_parameters(layers: Sequence[nn.Module]) -> int:
    """Returns the number of values, including frozen ones; tied ones count once. Works on the meta device."""
    return sum(parameter.numel() for _, _, parameter in distinct_parameters(layers))


def trainable(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yields the parameters of a module that are not frozen, in order."""
    return (parameter for parameter in module.parameters() if parameter.requires_grad)


def frozen_values(module: nn.Module) -> int:
    """Returns the number of values in the frozen parameters of a module."""
    return sum(parameter.numel() for parameter in module.parameters() if not parameter.requires_grad)


def check_frozen(layers: Sequence[nn.Module]) -> None:
    """Raises SettingError when all parameters are frozen, or only some copies of a tied one."""
    parameters = [parameter for layer in layers for parameter in layer.parameters()]
    if parameters and not any(parameter.requires_grad for parameter in parameters):
        raise SettingError(
            f"all {len(parameters)} parameters of the model are frozen, so there is nothing to train; "
            "set requires_grad of some of them"
        )
    copies: dict[str, dict[str, bool]] = {}
    for index, layer in enumerate(layers):
        for name, tie in ties_of(layer).items():
            copies.setdefault(tie, {})[f"layer {index}, {name}"] = layer.get_parameter(name).requires_grad
    for tie, trainable in copies.items():
        if len(set(trainable.values())) > 1:
            frozen = "; ".join(copy for copy, trained in trainable.items() if not trained)
            raise SettingError(
                f"{len(trainable)} layers share the parameter {tie!r}, and it is frozen in some of them alone "
                f"({frozen}); freeze it in all or in none"
            )


@contextmanager
def meta_device() -> Iterator[None]:
    """A context in which layers are built without values; ``materialize`` gives a stage's layers theirs."""
    with torch.device("meta"), _NoInitialValues():
        yield


class _NoInitialValues(TorchFunctionMode):
    """Skips what would initialise a tensor on the meta device. torch runs it as a decomposition, which takes most of
    the time to build a layer, and for ``normal_`` imports torch's compiler, which takes a second."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(function, "__module__", "") == "torch.nn.init" or function in (Tensor.normal_, Tensor.uniform_):
            tensor = args[0] if args else kwargs["tensor"]
            if tensor.is_meta:
                return tensor
        return function(*args, **kwargs)


def without_values(layer: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """Returns a copy of a user's layer on the meta device, from which ``materialize`` makes copies of the layer itself.
    ``memo`` is that of ``copy.deepcopy``."""
    bare = copied(layer, lambda tensor: tensor.to("meta"), memo)
    vars(bare)[ORIGINAL] = Original(layer)
    return bare


def materialize(layer: nn.Module, seed: int, device: torch.device) -> nn.Module:
    """Returns a copy of a meta-device layer on ``device``: with the values of a user's layer or, for one built on the
    meta device, with initial values that depend only on ``seed``."""
    if (original := vars(layer).get(ORIGINAL)) is not None:
        return copied(original.layer, partial(empty_on, device))
    layer = copied(layer, partial(empty_on, device))
    with seeded(seed, device):
        reset_all(layer)
    return layer


def empty_on(device: torch.device, tensor: Tensor) -> Tensor:
    """Returns an empty tensor for one on the meta device, a copy of any other; contiguous, as DeepSpeed needs it."""
    made = torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device, copy=True)
    return made.contiguous() if made.layout == torch.strided else made


def reset_all(module: nn.Module) -> None:
    """Calls the topmost ``reset_parameters`` of each branch: one initialises all that is below it."""
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()  # type: ignore[operator]
        return
    for child in module.children():
        reset_all(child)
