"""What crosses from one stage to the next: how many tensors, of which shape and dtype, and which carry gradients.

One record decides both directions: the tensors it lists go forward, and of those marked ``needs_gradient`` a gradient
comes back. Records are announced once a mini-batch, so every receive knows its size, whatever the shapes are this time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_DTYPES: list[torch.dtype] = [
    torch.float64, torch.float32, torch.bfloat16, torch.float16,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of one tensor of a boundary, and whether a gradient comes back for it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_gradient: bool

    @staticmethod
    def of(tensor: Tensor) -> TensorSpec:
        """Returns the record of a tensor as it stands."""
        return TensorSpec(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    def empty(self, device: torch.device) -> Tensor:
        """Returns memory for it on ``device``."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    @property
    def bytes(self) -> int:
        """Its size on the wire."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


Boundary = tuple[TensorSpec, ...]


@dataclass(frozen=True)
class Announcement:
    """What a stage tells the next before a mini-batch: each micro-batch's boundary, and where its numbering starts."""

    boundaries: tuple[Boundary, ...]
    offset: int

    def encode(self) -> Tensor:
        """Returns the announcement as one int64 vector; tensors travel, pickles do not."""
        numbers = [self.offset, len(self.boundaries)]
        for boundary in self.boundaries:
            numbers.append(len(boundary))
            for spec in boundary:
                numbers += [_DTYPES.index(spec.dtype), int(spec.needs_gradient), len(spec.shape), *spec.shape]
        return torch.tensor(numbers, dtype=torch.int64)

    @staticmethod
    def decode(vector: Tensor) -> Announcement:
        """Reverses ``encode``."""
        numbers = iter(vector.tolist())
        offset, count = next(numbers), next(numbers)
        boundaries = []
        for _ in range(count):
            boundary = []
            for _ in range(next(numbers)):
                dtype, needs, dims = _DTYPES[next(numbers)], bool(next(numbers)), next(numbers)
                boundary.append(TensorSpec(tuple(next(numbers) for _ in range(dims)), dtype, needs))
            boundaries.append(tuple(boundary))
        return Announcement(tuple(boundaries), offset)


def gradient_specs(boundary: Boundary) -> list[TensorSpec]:
    """Returns the records of the gradients that come back over a boundary."""
    return [spec for spec in boundary if spec.needs_gradient]


def announced(tensors: Sequence[Tensor], boundary: Boundary) -> tuple[Tensor, ...]:
    """Returns the tensors as announced: floating dtypes are cast to the announced one, anything else must agree.

    Mixed precision may leave a cell in another floating dtype than the shapes were inferred in.
    """
    assert len(tensors) == len(boundary), f"{len(tensors)} tensors leave the stage, {len(boundary)} were announced"
    sent = []
    for tensor, spec in zip(tensors, boundary, strict=True):
        assert tuple(tensor.shape) == spec.shape, (
            f"a tensor of shape {tuple(tensor.shape)} leaves, {spec.shape} was announced"
        )
        if tensor.dtype != spec.dtype:
            both_floating = tensor.is_floating_point() and spec.dtype.is_floating_point
            assert both_floating, f"a {tensor.dtype} tensor leaves, {spec.dtype} was announced"
            tensor = tensor.to(spec.dtype)
        sent.append(tensor)
    return tuple(sent)
