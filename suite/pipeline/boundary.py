"""What crosses from one stage to the next: how many tensors, of which shape and dtype, and which carry gradients.

One record decides both directions: the tensors it lists go forward, and of those marked ``needs_gradient`` a gradient
comes back. Records are announced once a mini-batch, so every receive knows its size, whatever the shapes are this time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    channels_last: bool = False
    """Whether images lie in memory place by place and not channel by channel, as fast kernels want them."""

    @staticmethod
    def of(tensor: Tensor) -> TensorSpec:
        """Returns the record of a tensor as it stands."""
        return TensorSpec(tuple(tensor.shape), tensor.dtype, tensor.requires_grad, _is_channels_last(tensor))

    @property
    def layout(self) -> torch.memory_format:
        """How it lies in memory."""
        return torch.channels_last if self.channels_last else torch.contiguous_format

    def empty(self, device: torch.device) -> Tensor:
        """Returns memory for it on ``device``."""
        return torch.empty(self.shape, dtype=self.dtype, device=device, memory_format=self.layout)

    @property
    def bytes(self) -> int:
        """Its size on the wire."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


Boundary = tuple[TensorSpec, ...]


def _is_channels_last(tensor: Tensor) -> bool:
    """Returns whether it lies so; one of a single channel or place lies both ways, and counts as plain."""
    return tensor.ndim == 4 and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=torch.channels_last)


def dense(tensor: Tensor) -> Tensor:
    """Returns a view of the tensor's memory that is contiguous, as messages must be."""
    return tensor.permute(0, 2, 3, 1) if _is_channels_last(tensor) else tensor


@dataclass(frozen=True, slots=True)
class Alive:
    """A skip that was given before a front and is taken after it (``suite.pipeline.skip``)."""

    name: str
    spec: TensorSpec
    same: int | None = None
    """The place among the front's ``main`` tensors where the very same tensor stands already."""

    def apart(self) -> Alive:
        """Returns it as a tensor of its own."""
        return Alive(self.name, self.spec)


@dataclass(frozen=True, slots=True)
class Front:
    """All that stands between two layers for one micro-batch: what the next layer gets, and skips on their way."""

    main: Boundary
    skips: tuple[Alive, ...] = ()

    @property
    def distinct(self) -> Boundary:
        """Each tensor once."""
        return self.main + tuple(one.spec for one in self.skips if one.same is None)


@dataclass(frozen=True)
class Announcement:
    """What a stage tells the next before a mini-batch: each micro-batch's front, and where its numbering starts."""

    fronts: tuple[Front, ...]
    offset: int

    def encode(self, names: Sequence[str] = ()) -> Tensor:
        """Returns the announcement as one int64 vector; tensors travel, pickles do not. ``names`` are the model's
        skips, known to both sides."""
        numbers = [self.offset, len(self.fronts)]
        for front in self.fronts:
            numbers += [len(front.main), len(front.skips)]
            for spec in front.main:
                numbers += _encoded(spec)
            for one in front.skips:
                numbers += [names.index(one.name), -1 if one.same is None else one.same, *_encoded(one.spec)]
        return torch.tensor(numbers, dtype=torch.int64)

    @staticmethod
    def decode(vector: Tensor, names: Sequence[str] = ()) -> Announcement:
        """Reverses ``encode``."""
        numbers = iter(vector.tolist())
        offset, count = next(numbers), next(numbers)
        fronts = []
        for _ in range(count):
            tensors, skips = next(numbers), next(numbers)
            main = tuple(_decoded(numbers) for _ in range(tensors))
            alive = []
            for _ in range(skips):
                name, same = names[next(numbers)], next(numbers)
                alive.append(Alive(name, _decoded(numbers), None if same < 0 else same))
            fronts.append(Front(main, tuple(alive)))
        return Announcement(tuple(fronts), offset)


def _encoded(spec: TensorSpec) -> list[int]:
    marks = int(spec.needs_gradient) + 2 * int(spec.channels_last)
    return [_DTYPES.index(spec.dtype), marks, len(spec.shape), *spec.shape]


def _decoded(numbers: Iterator[int]) -> TensorSpec:
    dtype, marks, dims = _DTYPES[next(numbers)], next(numbers), next(numbers)
    return TensorSpec(tuple(next(numbers) for _ in range(dims)), dtype, bool(marks & 1), bool(marks & 2))


def narrowed(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Returns the tensors, those of fp32 as bf16; what was one tensor twice stays one tensor twice.

    What stands between any two layers is narrowed, whether a stage ends there or not: so K is no part of the result.
    """
    once = {id(t): t.to(torch.bfloat16) if t.dtype == torch.float32 else t for t in tensors}
    return tuple(once[id(tensor)] for tensor in tensors)


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
