"""The one way to copy a layer: for shapes, trials and evaluation. What is trained of a user's model is no copy.

modules, attributes, hooks      as ``copy.deepcopy`` copies them
tensors, wherever they are      each once, as ``convert`` makes it: values, an empty tensor, one on the meta device
parameters                      with their class, their attributes and their hooks
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

MOST_OBJECTS = 200_000
"""The most objects that are searched for tensors, beside those in lists."""

_ATOMS = (int, float, complex, str, bytes, bool, type(None), type, ModuleType, torch.dtype, torch.device, torch.Size)


def copied(layer: nn.Module, convert: Callable[[Tensor], Tensor], memo: dict[int, Any] | None = None) -> nn.Module:
    """Returns a copy of a layer, whose tensors are what ``convert`` makes of the layer's, without graphs. ``memo`` is
    that of ``copy.deepcopy``. Raises what the copy of an attribute raises."""
    memo = {} if memo is None else memo
    for _, value in held(layer):
        if isinstance(value, Tensor) and id(value) not in memo:
            with torch._C.DisableTorchFunctionSubclass():
                made = convert(value.detach())
            memo[id(value)] = like(value, made) if isinstance(value, nn.Parameter) else made
    return copy.deepcopy(layer, memo)


def like(parameter: nn.Parameter, values: Tensor) -> nn.Parameter:
    """Returns a parameter of these values with the class, the attributes and the hooks of another one."""
    if type(values) is Tensor:
        made: nn.Parameter = Tensor._make_subclass(type(parameter), values, parameter.requires_grad)
    else:  # such as a fake tensor
        made = nn.Parameter(values, parameter.requires_grad)
    made.__dict__.update(parameter.__dict__)
    for hook in (parameter._backward_hooks or {}).values():
        made.register_hook(hook)
    for hook in (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values():
        made.register_post_accumulate_grad_hook(hook)
    return made


def held(layer: nn.Module) -> Iterator[tuple[str, Tensor | nn.Module]]:
    """Yields all tensors and modules that a layer reaches, each once, with the path of attributes to it: those that are
    registered, and those in lists, dicts, objects, hooks and partial functions. Not those that a function has captured
    (``captured``), which no copy replaces."""
    for path, value in _reached([("", layer)]):
        if isinstance(value, Tensor | nn.Module) and value is not layer:
            yield path, value


def captured(layer: nn.Module) -> Iterator[tuple[str, Tensor | nn.Module]]:
    """Yields the tensors and modules that functions of a layer have captured: in closures of its attributes and hooks,
    and as globals that its forward reads."""
    for path, value in _reached([("", layer)]):
        if isinstance(value, FunctionType):
            names = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
            cells = [(name, cell.cell_contents) for name, cell in names if cell != CellType()]
            for name, part in _reached([*cells, *(("a default", part) for part in value.__defaults__ or ())]):
                if isinstance(part, Tensor | nn.Module):
                    yield f"{name} in a function{f' of {path}' if path else ''}", part
        elif isinstance(value, nn.Module) and isinstance(forward := type(value).forward, FunctionType):
            for name in forward.__code__.co_names:
                if isinstance(part := forward.__globals__.get(name), Tensor | nn.Module):
                    yield f"the global {name}", part


def _reached(start: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    waiting, seen = deque(start), dict[int, Any]()
    while waiting and len(seen) < MOST_OBJECTS:
        path, value = waiting.popleft()
        if isinstance(value, _ATOMS) or id(value) in seen:
            continue
        seen[id(value)] = value
        yield path, value
        if not isinstance(value, Tensor | FunctionType):
            parts = ((f"{path}{name}".lstrip("."), part) for name, part in _parts(value))
            waiting.extend(pair for pair in parts if not isinstance(pair[1], _ATOMS))


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yields what an object holds, with how to get it."""
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, list | tuple | set | frozenset | deque):
        yield from ((f"[{at}]", part) for at, part in enumerate(value))
    elif isinstance(value, partial):
        yield from ((" of a partial function", part) for part in (value.func, *value.args, *value.keywords.values()))
    elif isinstance(value, MethodType):
        yield "", value.__self__
    else:
        slots = (name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ()))
        found = {name: getattr(value, name) for name in slots if isinstance(name, str) and hasattr(value, name)}
        found |= getattr(value, "__dict__", {})
        for name, part in found.items():
            if isinstance(value, nn.Module) and name in ("_parameters", "_buffers", "_modules"):
                yield from ((f".{own}", each) for own, each in part.items())
            else:
                yield f".{name}", part
