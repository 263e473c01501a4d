"""Kneser-Ney: a corpus counted by hand, probabilities that sum to 1, rows scored with the context they have; the
entropy of single tokens."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from suite.errors import DataError
from suite.evaluation.ngram import KneserNey, ngram_nll, unigram_entropy


def test_a_bigram_model_counted_by_hand():
    """a b a c a b b, with a, b, c = 0, 1, 2 and a vocabulary of 4.

    bigrams    ab 2, ba 1, ac 1, ca 1, bb 1     n1 = 4, n2 = 1: D = 4 / 6
    unigrams   different tokens before a: b, c = 2; b: a, b = 2; c: a = 1     n1 = 1, n2 = 2: D = 1 / 5
    """
    model = KneserNey(np.array([0, 1, 0, 2, 0, 1, 1]), 2, 4)
    low, high = 1 / 5, 4 / 6
    unigram = [(2 - low) / 5, (2 - low) / 5, (1 - low) / 5, 0]
    unigram = [each + low * 3 / 5 / 4 for each in unigram]
    after_a = [high * 2 / 3 * each for each in unigram]  # b and c follow the three a
    after_a[1] += (2 - high) / 3
    after_a[2] += (1 - high) / 3
    found = model.probabilities(np.array([[0, token] for token in range(4)]))
    assert found == pytest.approx(after_a)
    unseen = model.probabilities(np.array([[3, token] for token in range(4)]))
    assert unseen == pytest.approx(unigram)


@settings(max_examples=60)
@given(st.lists(st.integers(0, 6), min_size=3, max_size=80), st.integers(1, 3), st.data())
def test_probabilities_of_all_tokens_sum_to_one_after_any_context(tokens, order, data):
    model = KneserNey(np.array(tokens), order, 7)
    context = data.draw(st.lists(st.integers(0, 6), min_size=order - 1, max_size=order - 1))
    probabilities = model.probabilities(np.array([[*context, token] for token in range(7)]))
    assert probabilities.sum() == pytest.approx(1)
    assert (probabilities > 0).all()


def test_a_row_is_scored_with_the_tokens_before_it_in_the_row():
    train, row = np.array([0, 1, 2, 0, 1, 3, 2, 1, 0, 1, 2], dtype=np.uint16), [0, 1, 2, 0]
    bigram, trigram = KneserNey(train, 2, 5), KneserNey(train, 3, 5)
    parts = [
        bigram.probabilities(np.array([row[:2]])),
        trigram.probabilities(np.array([row[:3]])),
        trigram.probabilities(np.array([row[1:]])),
    ]
    found = ngram_nll(train, np.array([row]), 5, [3, 1])
    assert found[0] == pytest.approx(-sum(math.log(part[0]) for part in parts) / 3)
    unigram = KneserNey(train, 1, 5).probabilities(np.array([[token] for token in row[1:]]))
    assert found[1] == pytest.approx(-np.log(unigram).mean())


def test_the_entropy_of_even_and_certain_tokens():
    assert unigram_entropy([torch.arange(1, 7).reshape(2, 3), torch.arange(7, 9)]) == pytest.approx(math.log(8))
    assert unigram_entropy([torch.full((3, 3), 5)]) == 0
    assert unigram_entropy([torch.tensor([[1, 1, 1, 2, 0, 0]])]) == pytest.approx(
        -0.75 * math.log(0.75) + 0.25 * math.log(4)
    )
    assert unigram_entropy([torch.tensor([7, 7, 9, 9])], padding=7) == 0
    with pytest.raises(DataError, match="without tokens"):
        unigram_entropy([torch.zeros(4, dtype=torch.int64)])
