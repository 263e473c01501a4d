"""The metadata of a mini-batch: the shapes of each micro-batch at a cut, sent to the next cell as numbers.

first time       offset, 3 micro-batches, 2 new cuts: <cut 0> <cut 1>, then 0 1 0
later            offset, 3 micro-batches, none new, then 1 1 0              a known cut is a number
no change        offset, -1                                                 as before
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from suite.pipeline.runtime.boundary import CutSpec, OpenSkip, TensorSpec

_DTYPES: list[torch.dtype] = [
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.uint64, torch.uint32, torch.uint16,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
]  # fmt: skip

_AS_BEFORE = -1

_MAX_KNOWN = 10_000
"""The most cuts that both sides remember."""


@dataclass(frozen=True)
class BoundaryMetadata:
    """Sent to the next cell before a mini-batch: the cut of each micro-batch, and the first micro-batch's number."""

    cuts: tuple[CutSpec, ...]
    offset: int


class MetadataCodec:
    """Metadata as int64 vectors, so that no pickles are sent.

    Each side of a link has one, and both must see the same metadata in the same order: a cut is described once and is a
    number from then on. ``names`` are the model's skips, known on both sides.
    """

    def __init__(self) -> None:
        self._numbers: dict[CutSpec, int] = {}
        self._last: tuple[CutSpec, ...] | None = None

    def encode(self, metadata: BoundaryMetadata, names: Sequence[str] = ()) -> Tensor:
        """Returns the metadata as one vector."""
        if metadata.cuts == self._last:
            return torch.tensor([metadata.offset, _AS_BEFORE])
        self._forget_if_full()
        new = [cut for cut in dict.fromkeys(metadata.cuts) if cut not in self._numbers]
        self._learn(new)
        self._last = metadata.cuts
        described = [number for cut in new for number in _encoded_cut(cut, names)]
        known = [self._numbers[cut] for cut in metadata.cuts]
        return torch.tensor([metadata.offset, len(known), len(new), *described, *known])

    def decode(self, vector: Tensor, names: Sequence[str] = ()) -> BoundaryMetadata:
        """Reverses ``encode`` of the other side. Equal cuts are one object."""
        numbers = iter(vector.tolist())
        offset, count = next(numbers), next(numbers)
        if count == _AS_BEFORE:
            assert self._last is not None, "as before, but nothing came before"
            return BoundaryMetadata(self._last, offset)
        self._forget_if_full()
        self._learn([_decoded_cut(numbers, names) for _ in range(next(numbers))])
        known = list(self._numbers)
        self._last = tuple(known[next(numbers)] for _ in range(count))
        return BoundaryMetadata(self._last, offset)

    def _learn(self, cuts: Sequence[CutSpec]) -> None:
        for cut in cuts:
            self._numbers[cut] = len(self._numbers)

    def _forget_if_full(self) -> None:
        if len(self._numbers) > _MAX_KNOWN:
            self._numbers.clear()


def _encoded_cut(cut: CutSpec, names: Sequence[str]) -> Iterator[int]:
    yield from (len(cut.main), len(cut.skips))
    for spec in cut.main:
        yield from _encoded(spec)
    for skip in cut.skips:
        yield from (names.index(skip.name), -1 if skip.same_as_output is None else skip.same_as_output)
        yield from _encoded(skip.spec)


def _decoded_cut(numbers: Iterator[int], names: Sequence[str]) -> CutSpec:
    tensors, skips = next(numbers), next(numbers)
    main = tuple(_decoded(numbers) for _ in range(tensors))
    open_skips = []
    for _ in range(skips):
        name, same = names[next(numbers)], next(numbers)
        open_skips.append(OpenSkip(name, _decoded(numbers), None if same < 0 else same))
    return CutSpec(main, tuple(open_skips))


def _encoded(spec: TensorSpec) -> list[int]:
    flags = int(spec.needs_gradient) + 2 * int(spec.channels_last)
    return [_DTYPES.index(spec.dtype), flags, len(spec.shape), *spec.shape]


def _decoded(numbers: Iterator[int]) -> TensorSpec:
    dtype, flags, dims = _DTYPES[next(numbers)], next(numbers), next(numbers)
    return TensorSpec(tuple(next(numbers) for _ in range(dims)), dtype, bool(flags & 1), bool(flags & 2))
