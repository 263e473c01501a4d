"""Buffers that a layer's own forward changes, such as the vectors of ``spectral_norm``. A recompute starts from those
of its forward, and leaves those of the last forward in place.

    F0 (u0 -> u1)   F1 (u1 -> u2)   R0 (u0 -> u1, put aside)   R1 (u1 -> u2, put aside)   the next step begins with u2
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

Values = list[tuple[nn.Module, str, Tensor]]
"""Buffers by module and name."""


def copies_of_buffers(layers: nn.Module) -> Values:
    """Returns copies of all buffers."""
    return [(*place, _get(place).clone()) for place in _places(layers)]


class ChangingBuffers:
    """Those of one cell. Its first forward shows which they are."""

    def __init__(self, layers: nn.Module) -> None:
        self._places = _places(layers)
        self._changing = set(self._places)
        self._is_first = True

    @contextmanager
    def recorded(self, values: Values) -> Iterator[None]:
        """A context of a forward that is recomputed later. Adds to ``values`` what the changed buffers were before it.

        Raises RuntimeError for a buffer that did not change in the first forward.
        """
        copies = {place: _get(place).clone() for place in self._changing}
        with self._watched() as changed:
            yield
        if self._is_first:
            self._changing, self._is_first = {*changed}, False
        for module, name in changed:
            if (module, name) not in self._changing:
                raise RuntimeError(
                    f"{type(module).__name__} changes its buffer {name} in some forwards and not in the first one, so "
                    "a recompute cannot start from its value; set pipeline.remat=never, or change it in each forward"
                )
        values += [(*place, copies[place]) for place in changed]

    @contextmanager
    def left_to_graph(self) -> Iterator[None]:
        """A context of a forward with a graph. The graph may have saved the buffers that it changed, and the next
        forward changes them again, so copies take their place after it."""
        with self._watched() as changed:
            yield
        for module, name in changed:
            if not (buffer := _get((module, name))).requires_grad:
                module._buffers[name] = buffer.clone()

    @contextmanager
    def _watched(self) -> Iterator[list[tuple[nn.Module, str]]]:
        """A context of a forward, after which the list has the buffers that it changed."""
        before = [(buffer := _get(place), buffer._version) for place in self._places]
        changed: list[tuple[nn.Module, str]] = []
        yield changed
        for place, (buffer, version) in zip(self._places, before, strict=True):
            if _get(place) is not buffer or buffer._version != version:
                changed.append(place)


@contextmanager
def replaced(values: Values) -> Iterator[None]:
    """A context in which buffers have these values, as for a recompute. It exchanges the tensors: a graph may hold
    them."""
    now = [(module, name, module._buffers[name]) for module, name, _ in values]
    for module, name, value in values:
        module._buffers[name] = value
    try:
        yield
    finally:
        for module, name, buffer in now:
            module._buffers[name] = buffer


def _places(layers: nn.Module) -> list[tuple[nn.Module, str]]:
    return [
        (module, name) for module in layers.modules() for name, buffer in module._buffers.items() if buffer is not None
    ]


def _get(place: tuple[nn.Module, str]) -> Tensor:
    module, name = place
    buffer = module._buffers.get(name)
    if not isinstance(buffer, torch.Tensor):
        raise RuntimeError(f"{type(module).__name__} removes its buffer {name} in a forward; change its value instead")
    return buffer
