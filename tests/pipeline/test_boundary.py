"""Records of what crosses a boundary."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from suite.pipeline.boundary import Announcement, TensorSpec, announced

dtypes = st.sampled_from(
    [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool]
)
specs = st.builds(TensorSpec, st.lists(st.integers(0, 2**40), max_size=4).map(tuple), dtypes, st.booleans())
boundaries = st.lists(st.lists(specs, max_size=4).map(tuple), max_size=5).map(tuple)


@given(boundaries, st.integers(0, 10_000))
def test_an_announcement_survives_its_journey_as_numbers(boundaries, offset):
    announcement = Announcement(boundaries, offset)
    assert Announcement.decode(announcement.encode()) == announcement


def test_a_mixed_precision_output_is_sent_as_announced():
    spec = TensorSpec((2,), torch.float32, True)
    (sent,) = announced([torch.ones(2, dtype=torch.bfloat16)], (spec,))
    assert sent.dtype == torch.float32


@pytest.mark.parametrize("tensor", [torch.ones(3), torch.ones(2, dtype=torch.int64)])
def test_another_shape_or_kind_than_announced_is_a_fault(tensor):
    with pytest.raises(AssertionError, match="was announced"):
        announced([tensor], (TensorSpec((2,), torch.float32, True),))
