"""What tests of all mini-batches share."""

import torch


def joined(batch):
    """Returns the inputs and the targets of all micro-batches, of one tensor each."""
    return torch.cat([x for (x,) in batch.inputs]), torch.cat([y for (y,) in batch.targets])


def assert_parts(both, first, last, *middle):
    """Checks that a first stage gets the inputs alone, a last one the targets alone, and one in the middle neither."""
    for found, wanted in ((first.inputs, both.inputs), (last.targets, both.targets)):
        for own, others in zip(found, wanted, strict=True):
            assert all(torch.equal(one, other) for one, other in zip(own, others, strict=True))
    assert {*first.targets, *last.inputs, *(x for part in middle for x in (*part.inputs, *part.targets))} == {()}
    for part in (first, last, *middle):
        assert (part.divisor, part.offset, part.groups, len(part)) == (
            both.divisor, both.offset, both.groups, len(both),
        )  # fmt: skip
