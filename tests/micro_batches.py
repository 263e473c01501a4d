"""A mini-batch as micro-batches, for tests that make their own."""

from collections.abc import Sequence

from torch import Tensor

from suite.pipeline.model.layers import Tensors
from suite.pipeline.model.microbatch import even_split_sizes


def split(tensors: Sequence[Tensor], micro_batches: int) -> list[Tensors]:
    """Cuts tensors (rows, ...) into tuples of micro-batches."""
    parts = even_split_sizes(len(tensors[0]), micro_batches)
    return list(zip(*(tensor.split(parts) for tensor in tensors), strict=True))
