"""Shuffled epochs: every row once an epoch, and any slice of the sequence by itself."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from suite.data.epochs import ShuffledEpochs
from suite.pipeline.model.rng import mix


@given(st.integers(1, 9), st.integers(0, 30), st.integers(0, 30))
def test_rows_are_a_slice_of_torchs_permutations(total, begin, count):
    orders = [torch.randperm(total, generator=torch.Generator().manual_seed(mix(3, 8, epoch))) for epoch in range(61)]
    assert ShuffledEpochs(total, 3, 8).rows(begin, begin + count) == torch.cat(orders).tolist()[begin : begin + count]
