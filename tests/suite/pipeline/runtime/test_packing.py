"""Ids and masks share one message; what is unpacked equals what was packed."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from suite.pipeline.runtime.boundary import TensorSpec
from suite.pipeline.runtime.packing import message_specs, pack, unpack

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.uint8, torch.uint64, torch.bool]

shapes = st.lists(st.integers(0, 3), max_size=4).map(tuple)
boundaries = st.lists(st.tuples(shapes, st.sampled_from(DTYPES), st.booleans()), max_size=6)


def tensor(shape, dtype, channels_last):
    values = torch.randint(0, 2, shape).to(dtype)
    return values.contiguous(memory_format=torch.channels_last) if channels_last and values.ndim == 4 else values


@given(boundaries)
def test_every_boundary_survives(boundary):
    tensors = [tensor(*each) for each in boundary]
    specs = [TensorSpec.of(each) for each in tensors]
    messages = pack(tensors, specs)
    assert [TensorSpec.of(message) for message in messages] == message_specs(specs)
    received = [message.clone(memory_format=torch.preserve_format) for message in messages]
    for sent, unpacked in zip(tensors, unpack(received, specs), strict=True):
        assert (sent.dtype, sent.shape) == (unpacked.dtype, unpacked.shape)
        assert sent.equal(unpacked)


def test_a_boundary_of_the_translation_model_is_two_messages():
    x, sentence, target = torch.rand(2, 8, 64), torch.zeros(2, 8, dtype=torch.int64), torch.ones(2, 6).long()
    specs = [TensorSpec.of(each) for each in (x, sentence, target)]
    own, packed = pack((x, sentence, target), specs)
    assert own is x
    assert packed.nbytes == sentence.nbytes + target.nbytes


def test_a_mask_alone_is_not_copied():
    mask = torch.ones(3, dtype=torch.bool)
    assert pack([mask], [TensorSpec.of(mask)])[0] is mask
