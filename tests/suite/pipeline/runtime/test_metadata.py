"""The metadata of mini-batches: what one side encodes the other decodes, and known cuts are sent as numbers."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from suite.pipeline.runtime import metadata as module
from suite.pipeline.runtime.boundary import CutSpec, OpenSkip, TensorSpec
from suite.pipeline.runtime.metadata import BoundaryMetadata, MetadataCodec

dtypes = st.sampled_from(
    [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.uint16, torch.bool]
)
specs = st.builds(
    TensorSpec, st.lists(st.integers(0, 2**40), max_size=4).map(tuple), dtypes, st.booleans(), st.booleans()
)
NAMES = ("a", "b", "output 7")
alive = st.builds(OpenSkip, st.sampled_from(NAMES), specs, st.none() | st.integers(0, 3))
cuts = st.builds(CutSpec, st.lists(specs, max_size=4).map(tuple), st.lists(alive, max_size=3).map(tuple))


@settings(max_examples=25)
@given(st.lists(st.tuples(st.lists(cuts, max_size=5).map(tuple), st.integers(0, 10_000)), max_size=5))
def test_metadata_survives_a_link(mini_batches):
    """Each mini-batch comes twice, so that some cuts are known and some mini-batches are as before."""
    sender, receiver = MetadataCodec(), MetadataCodec()
    for found, offset in (mini_batch for mini_batch in mini_batches for _ in range(2)):
        sent = BoundaryMetadata(found, offset)
        assert receiver.decode(sender.encode(sent, NAMES), NAMES) == sent


def cut(width):
    return CutSpec((TensorSpec((width, 64), torch.float32, True), TensorSpec((width,), torch.int64, False)))


def test_a_known_cut_is_one_number_and_an_equal_mini_batch_is_two():
    codec, widths = MetadataCodec(), (8, 16, 8, 8)
    first, second, third = (
        codec.encode(BoundaryMetadata(tuple(map(cut, each)), 0)) for each in (widths, reversed(widths), (8, 8, 16, 8))
    )
    description = 2 + 5 + 4  # tensors and skips; dtype, flags, dimensions and shape of a matrix, and of a vector
    assert first.numel() == 3 + 2 * description + 4
    assert second.tolist() == [0, 4, 0, 0, 0, 1, 0]
    assert third.tolist() == [0, -1]


def test_both_sides_forget_together(monkeypatch):
    monkeypatch.setattr(module, "_MAX_KNOWN", 3)
    sender, receiver = MetadataCodec(), MetadataCodec()
    for width in (1, 2, 3, 4, 5, 1, 2, 9, 1):
        sent = BoundaryMetadata((cut(width), cut(width + 1)), width)
        assert receiver.decode(sender.encode(sent)) == sent
        assert len(sender._numbers) == len(receiver._numbers) <= 5
