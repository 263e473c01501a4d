"""The unigram entropy is the lowest loss without context."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from suite.errors import DataError
from suite.evaluation.unigram import unigram_entropy


def test_even_and_certain_tokens():
    assert unigram_entropy([torch.arange(1, 9).reshape(2, 4)]) == pytest.approx(math.log(8))
    assert unigram_entropy([torch.full((3, 3), 5)]) == 0
    assert unigram_entropy([torch.tensor([[1, 1, 1, 2, 0, 0]])]) == pytest.approx(
        -0.75 * math.log(0.75) + 0.25 * math.log(4)
    )
    assert unigram_entropy([torch.tensor([7, 7, 9, 9])], padding=7) == 0
    with pytest.raises(DataError, match="without tokens"):
        unigram_entropy([torch.zeros(4, dtype=torch.int64)])


@given(st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=9), min_size=1, max_size=4), st.integers(0, 99))
def test_no_predictor_without_context_is_better(rows: list[list[int]], seed: int):
    labels = [torch.tensor(row) for row in rows]
    predictor = torch.randn(6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).log_softmax(0)
    assert unigram_entropy(labels) <= -predictor[torch.cat(labels)].mean() + 1e-12
    assert unigram_entropy(labels) == pytest.approx(unigram_entropy([torch.cat(labels)]))
