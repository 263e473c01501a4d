"""Records of what crosses a boundary."""

import math

import pytest
import torch

from suite.pipeline.runtime.boundary import (
    TensorSpec,
    cast_to_boundary,
    contiguous_view,
)


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
