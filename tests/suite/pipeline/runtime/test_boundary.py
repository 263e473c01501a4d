"""Records of what crosses a boundary."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from suite.pipeline.runtime.boundary import (
    BoundaryMetadata,
    CutSpec,
    OpenSkip,
    TensorSpec,
    cast_to_boundary,
    contiguous_view,
)

dtypes = st.sampled_from(
    [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool]
)
specs = st.builds(
    TensorSpec, st.lists(st.integers(0, 2**40), max_size=4).map(tuple), dtypes, st.booleans(), st.booleans()
)
NAMES = ("a", "b", "output 7")
alive = st.builds(OpenSkip, st.sampled_from(NAMES), specs, st.none() | st.integers(0, 3))
cuts = st.builds(CutSpec, st.lists(specs, max_size=4).map(tuple), st.lists(alive, max_size=3).map(tuple))


@given(st.lists(cuts, max_size=5).map(tuple), st.integers(0, 10_000))
def test_metadata_survives_encoding(found, offset):
    metadata = BoundaryMetadata(found, offset)
    assert BoundaryMetadata.decode(metadata.encode(NAMES), NAMES) == metadata


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (2, 1, 4, 5), (2, 3, 1, 1), (0, 3, 4, 5)])
def test_images_keep_their_layout(shape):
    plain = torch.arange(math.prod(shape)).view(shape)
    for images in (plain, plain.contiguous(memory_format=torch.channels_last)):
        room = TensorSpec.of(images).empty(torch.device("cpu"))
        assert room.stride() == images.stride() or images.numel() <= 1 or 1 in shape
        assert contiguous_view(images).is_contiguous()
        contiguous_view(room).copy_(contiguous_view(images))
        assert room.equal(images)


def test_a_mixed_precision_output_is_sent_in_the_boundary_dtype():
    spec = TensorSpec((2,), torch.float32, True)
    (sent,) = cast_to_boundary([torch.ones(2, dtype=torch.bfloat16)], (spec,))
    assert sent.dtype == torch.float32


@pytest.mark.parametrize("tensor", [torch.ones(3), torch.ones(2, dtype=torch.int64)])
def test_another_shape_or_dtype_than_the_boundary_is_an_error(tensor):
    with pytest.raises(AssertionError, match="its boundary"):
        cast_to_boundary([tensor], (TensorSpec((2,), torch.float32, True),))
