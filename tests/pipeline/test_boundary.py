"""Records of what crosses a boundary."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from suite.pipeline.boundary import Alive, Announcement, Front, TensorSpec, announced, dense

dtypes = st.sampled_from(
    [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool]
)
specs = st.builds(
    TensorSpec, st.lists(st.integers(0, 2**40), max_size=4).map(tuple), dtypes, st.booleans(), st.booleans()
)
NAMES = ("a", "b", "output 7")
alive = st.builds(Alive, st.sampled_from(NAMES), specs, st.none() | st.integers(0, 3))
fronts = st.builds(Front, st.lists(specs, max_size=4).map(tuple), st.lists(alive, max_size=3).map(tuple))


@given(st.lists(fronts, max_size=5).map(tuple), st.integers(0, 10_000))
def test_an_announcement_survives_its_journey_as_numbers(found, offset):
    announcement = Announcement(found, offset)
    assert Announcement.decode(announcement.encode(NAMES), NAMES) == announcement


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (2, 1, 4, 5), (2, 3, 1, 1), (0, 3, 4, 5)])
def test_images_keep_their_layout(shape):
    plain = torch.arange(math.prod(shape)).view(shape)
    for images in (plain, plain.contiguous(memory_format=torch.channels_last)):
        room = TensorSpec.of(images).empty(torch.device("cpu"))
        assert room.stride() == images.stride() or images.numel() <= 1 or 1 in shape
        assert dense(images).is_contiguous()
        dense(room).copy_(dense(images))
        assert room.equal(images)


def test_a_mixed_precision_output_is_sent_as_announced():
    spec = TensorSpec((2,), torch.float32, True)
    (sent,) = announced([torch.ones(2, dtype=torch.bfloat16)], (spec,))
    assert sent.dtype == torch.float32


@pytest.mark.parametrize("tensor", [torch.ones(3), torch.ones(2, dtype=torch.int64)])
def test_another_shape_or_kind_than_announced_is_a_fault(tensor):
    with pytest.raises(AssertionError, match="was announced"):
        announced([tensor], (TensorSpec((2,), torch.float32, True),))
