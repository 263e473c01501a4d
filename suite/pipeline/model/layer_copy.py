"""The one way to copy a layer: for stages, shapes, trials and inference.

modules, attributes, hooks      as ``copy.deepcopy`` copies them
tensors, wherever they are      each once, as ``convert`` makes it: values, an empty tensor, one on the meta device
parameters                      with their class, their attributes and their hooks
functions                       are not copied: what they have captured stays the original (``captured``)
"""

from __future__ import annotations

import copy
import dis
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import lru_cache, partial
from types import CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from suite.errors import SettingError

MOST_OBJECTS = 200_000
"""The most objects of a layer that are searched for tensors."""


class Original:
    """A user's layer, with its values. Copies of the layer without values share it."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer

    def __deepcopy__(self, memo: object) -> Original:
        return self


_OF_PYTHON = 1 << 9
"""The flag of types that Python code makes (``Py_TPFLAGS_HEAPTYPE``)."""

_PLAIN_TYPES = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_ATOMS = (*_PLAIN_TYPES, type, ModuleType, Original)


def copied(layer: nn.Module, convert: Callable[[Tensor], Tensor], memo: dict[int, Any] | None = None) -> nn.Module:
    """Returns a copy of a layer, whose tensors are what ``convert`` makes of the layer's, without graphs. ``memo`` is
    that of ``copy.deepcopy``. Raises what the copy of an attribute raises, and as ``held`` does."""
    memo = {} if memo is None else memo
    for _, value in held(layer):
        if isinstance(value, Tensor) and id(value) not in memo:
            with torch._C.DisableTorchFunctionSubclass():
                made = convert(value.detach())
            memo[id(value)] = like(value, made)
    return copy.deepcopy(layer, memo)


def like(tensor: Tensor, values: Tensor) -> Tensor:
    """Returns a tensor of these values with the class, the attributes and the hooks of another one."""
    made = values
    if type(values) is not Tensor:  # such as a fake tensor
        made = nn.Parameter(values, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else values
    elif isinstance(tensor, nn.Parameter):
        made = Tensor._make_subclass(type(tensor), values, tensor.requires_grad)
    elif type(tensor) is not Tensor:
        made = values.as_subclass(type(tensor))
    made.__dict__.update(tensor.__dict__)
    if made.requires_grad and isinstance(tensor, nn.Parameter):
        for hook in (tensor._backward_hooks or {}).values():
            made.register_hook(hook)
        for hook in (getattr(tensor, "_post_accumulate_grad_hooks", None) or {}).values():
            made.register_post_accumulate_grad_hook(hook)
    return made


def held(layer: nn.Module) -> Iterator[tuple[str, Tensor | nn.Module]]:
    """Yields all tensors and modules that a layer reaches, each once, with the path of attributes to it: those that are
    registered, and those in lists, dicts, objects, hooks and partial functions.

    Raises SettingError for a layer that holds more than ``MOST_OBJECTS`` other objects."""
    for path, value in _reached([("", layer)]):
        if isinstance(value, Tensor | nn.Module) and value is not layer:
            yield path, value


def captured(value: Any) -> Iterator[tuple[str, Tensor | nn.Module]]:
    """Yields the tensors and modules that a function, or functions of a layer, have captured: in closures and defaults,
    as globals that they read, and as attributes of a class. Functions of the same file that they call are followed."""
    seen: set[int] = set()
    for path, each in _reached([("", value)]):
        functions = [each] if isinstance(each, FunctionType) else []
        if isinstance(each, nn.Module):
            own = (kind for kind in type(each).__mro__ if not kind.__module__.startswith("torch."))
            of_class = [(name, part) for kind in own for name, part in vars(kind).items()]
            functions += [part for _, part in of_class if isinstance(part, FunctionType)]
            parts = ((f"the class attribute {name}", part) for name, part in of_class)
            yield from ((name, part) for name, part in parts if isinstance(part, Tensor | nn.Module))
        for function in functions:
            yield from _captured_by(function, f" of {path}" if path else "", seen)


def _captured_by(function: FunctionType, where: str, seen: set[int]) -> Iterator[tuple[str, Tensor | nn.Module]]:
    if id(function) in seen:
        return
    seen.add(id(function))
    start: list[tuple[str, Any]] = []
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # not filled yet
            start.append((f"{name} in a function{where}", cell.cell_contents))
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    start += [(f"a default of a function{where}", part) for part in defaults]
    for name in _globals_read(function.__code__):
        part = function.__globals__.get(name)
        if isinstance(part, Tensor | nn.Module | FunctionType):
            start.append((f"the global {name}", part))
    for path, part in _reached(start):
        if isinstance(part, Tensor | nn.Module):
            yield path, part
        elif isinstance(part, FunctionType) and part.__module__ == function.__module__:
            yield from _captured_by(part, where, seen)


@lru_cache(maxsize=4096)
def _globals_read(code: CodeType) -> frozenset[str]:
    """Returns the globals that a function, or one inside it, reads."""
    own = {step.argval for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return frozenset(own.union(*(_globals_read(part) for part in code.co_consts if isinstance(part, CodeType))))


def _reached(start: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    waiting: deque[tuple[Any, str, Any]] = deque((None, path, value) for path, value in start)
    seen: dict[int, Any] = {}
    while waiting:
        above, piece, value = waiting.popleft()
        if id(value) in seen or issubclass(type(value), _ATOMS):
            continue
        if len(seen) == MOST_OBJECTS:
            raise SettingError(f"it holds more than {MOST_OBJECTS:,} objects; keep data out of layers")
        seen[id(value)] = value
        here = (above, piece)
        yield _path(here), value
        if not isinstance(value, Tensor | FunctionType):
            waiting.extend((here, name, part) for name, part in _parts(value) if not issubclass(type(part), _ATOMS))


def _path(place: Any) -> str:
    pieces = []
    while place is not None:
        place, piece = place
        pieces.append(piece)
    return "".join(reversed(pieces)).lstrip(".")


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yields what an object holds, with how to get it."""
    if isinstance(value, dict):
        items = ((key if isinstance(key, str) else at, part) for at, (key, part) in enumerate(value.items()))
        yield from ((f"[{key!r}]", part) for key, part in items)
        yield from (("[a key]", key) for key in value)
    elif isinstance(value, list | tuple | set | frozenset | deque):
        yield from ((f"[{at}]", part) for at, part in enumerate(value))
    elif isinstance(value, partial):
        yield from ((" of a partial function", part) for part in (value.func, *value.args, *value.keywords.values()))
    elif isinstance(value, MethodType):
        yield from (("", part) for part in (value.__self__, value.__func__))
    elif isinstance(value, ref):
        yield "", value()
    for name, part in _attributes(value).items():
        if isinstance(value, nn.Module) and name in ("_parameters", "_buffers", "_modules"):
            yield from ((f".{own}", each) for own, each in part.items())
        else:
            yield f".{name}", part


def _attributes(value: Any) -> dict[str, Any]:
    """Returns an object's attributes, without calling its own code."""
    found = {}
    for kind in type(value).__mro__:
        if kind.__flags__ & _OF_PYTHON and "__slots__" not in vars(kind):  # most classes, with hundreds of members
            continue
        for name, member in vars(kind).items():
            if isinstance(member, MemberDescriptorType):
                with suppress(AttributeError):
                    found[name] = member.__get__(value)
    with suppress(AttributeError):
        found |= object.__getattribute__(value, "__dict__")
    return found
