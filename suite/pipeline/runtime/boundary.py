"""The tensors between two cells: how many, of which shape and dtype, and which need gradients.

One record describes both directions: the listed tensors go forward, and gradients of those with ``needs_gradient`` come
back. Each cell sends it to the next one once a mini-batch, so every receive knows its size even if shapes change
(``suite.pipeline.runtime.metadata``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of one tensor of a boundary, and whether it needs a gradient."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_gradient: bool
    channels_last: bool = False
    """Whether images are in torch's ``channels_last`` memory format, which fast kernels need."""

    @staticmethod
    def of(tensor: Tensor) -> TensorSpec:
        return TensorSpec(tuple(tensor.shape), tensor.dtype, tensor.requires_grad, _is_channels_last(tensor))

    @property
    def layout(self) -> torch.memory_format:
        return torch.channels_last if self.channels_last else torch.contiguous_format

    def empty(self, device: torch.device) -> Tensor:
        """Returns an uninitialised tensor of this spec on ``device``."""
        return torch.empty(self.shape, dtype=self.dtype, device=device, memory_format=self.layout)

    @property
    def bytes(self) -> int:
        """Its size in a message."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


Boundary = tuple[TensorSpec, ...]


def _is_channels_last(tensor: Tensor) -> bool:
    """Returns whether a tensor is channels_last; one that is also contiguous counts as contiguous."""
    return tensor.ndim == 4 and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=torch.channels_last)


def contiguous_view(tensor: Tensor) -> Tensor:
    """Returns a contiguous view of the tensor's memory, as messages need."""
    return tensor.permute(0, 2, 3, 1) if _is_channels_last(tensor) else tensor


@dataclass(frozen=True, slots=True)
class OpenSkip:
    """A skip that is stashed before a cut and popped behind it (``suite.pipeline.runtime.skip``)."""

    name: str
    spec: TensorSpec
    same_as_output: int | None = None
    """The index of the same tensor among the cut's ``main`` tensors, if it is one of them."""

    def as_own_tensor(self) -> OpenSkip:
        return OpenSkip(self.name, self.spec)


@dataclass(frozen=True, slots=True)
class CutSpec:
    """All tensors between two layers for one micro-batch: the next layer's inputs, and open skips."""

    main: Boundary
    skips: tuple[OpenSkip, ...] = ()

    @staticmethod
    def of(tensors: Sequence[Tensor]) -> CutSpec:
        """Returns the cut of some tensors, without skips."""
        return CutSpec(tuple(map(TensorSpec.of, tensors)))

    @property
    def distinct_tensors(self) -> Boundary:
        """Each tensor once."""
        return self.main + tuple(skip.spec for skip in self.skips if skip.same_as_output is None)


def to_bf16(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Returns the tensors with fp32 cast to bf16; a tensor that occurs twice stays one tensor.

    This happens between any two layers, whether or not a cell ends there, so results do not depend on K.
    """
    cast = {id(t): t.to(torch.bfloat16) if t.dtype == torch.float32 else t for t in tensors}
    return tuple(cast[id(tensor)] for tensor in tensors)


def cast_to_boundary(tensors: Sequence[Tensor], boundary: Boundary) -> tuple[Tensor, ...]:
    """Returns the tensors with the boundary's dtypes: floating dtypes are cast, everything else must be equal.

    Under mixed precision a cell's outputs may have another floating dtype than shape inference found.
    """
    assert len(tensors) == len(boundary), f"the cell has {len(tensors)} outputs, its boundary {len(boundary)}"
    cast = []
    for tensor, spec in zip(tensors, boundary, strict=True):
        shape = tuple(tensor.shape)
        assert shape == spec.shape, f"an output has shape {shape}, its boundary {spec.shape}"
        if tensor.dtype != spec.dtype:
            both_floating = tensor.is_floating_point() and spec.dtype.is_floating_point
            assert both_floating, f"an output has dtype {tensor.dtype}, its boundary {spec.dtype}"
            tensor = tensor.to(spec.dtype)
        cast.append(tensor)
    return tuple(cast)
