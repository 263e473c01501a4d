"""The search against one written by hand, in company."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from suite.decoding.beam import Beam
from suite.errors import NonFiniteError

END = 1


class Scorer:
    """Logits that depend on the whole text so far and on the sentence, as a model's do; any text has its own."""

    def __init__(self, seeds, words, sharp=2.0):
        self.seeds, self.words, self.sharp = list(seeds), words, sharp
        self.texts = [[()] for _ in self.seeds]

    def of(self, seed, text):
        generator = torch.Generator().manual_seed(hash((seed, text)) % 2**31)
        return torch.randn(self.words, generator=generator) * self.sharp

    def logits(self):
        return torch.stack(
            [self.of(seed, text) for seed, row in zip(self.seeds, self.texts, strict=True) for text in row]
        )

    def extend(self, move):
        kept = move.kept.tolist()
        self.seeds = [self.seeds[at] for at in kept]
        self.texts = [
            [(*self.texts[at][parent], token) for parent, token in zip(*row, strict=True)]
            for at, row in zip(kept, zip(move.parents.tolist(), move.tokens.tolist(), strict=True), strict=True)
        ]
        return self.logits()


def decoded(seeds, words, limits, size, penalty=0.6):
    scorer = Scorer(seeds, words)
    beam = Beam(limits, size, END, penalty)
    update = beam.advance(scorer.logits())
    while not update.finished:
        update = beam.advance(scorer.extend(update))
    return beam


def by_hand(seed, words, limit, size, penalty):
    """The search as one would write it for one sentence, without an end before its time."""
    scorer, live, ended = Scorer([], words), [((), 0.0)], []
    for length in range(1, limit + 1):
        grown = [
            ((*text, word), score + more)
            for text, score in live
            for word, more in enumerate(scorer.of(seed, text).log_softmax(-1).tolist())
        ]
        best = sorted(grown, key=lambda one: -one[1])[:size]
        over = [one for one in best if one[0][-1] == END or length == limit]
        ended += over
        live = [one for one in best if one not in over]
    text, score = max(ended, key=lambda one: one[1] / ((5 + len(one[0])) / 6) ** penalty)
    return list(text[:-1] if text[-1] == END else text), score / ((5 + len(text)) / 6) ** penalty


@settings(max_examples=40)
@given(
    st.lists(st.integers(0, 10_000), min_size=1, max_size=4), st.integers(2, 6), st.sampled_from([1, 2, 3, 4, 99]),
    st.sampled_from([0.0, 0.6, 1.0]), st.data(),
)  # fmt: skip
def test_a_beam_in_company_is_the_one_written_by_hand(seeds, words, size, penalty, data):
    limits = [data.draw(st.integers(1, 7 if size < 9 else 4)) for _ in seeds]
    beam = decoded(seeds, words, limits, size, penalty)
    for place, seed in enumerate(seeds):
        result, score = by_hand(seed, words, limits[place], size, penalty)
        assert beam.scores[place] == pytest.approx(score, abs=1e-4)
        assert beam.results[place] == result


def test_a_done_sentence_leaves_the_batch():
    beam = Beam([5, 5], 1, END)
    ends, goes_on = torch.tensor([0.0, 9.0, 0.0]), torch.tensor([0.0, 0.0, 9.0])
    move = beam.advance(torch.stack((ends, goes_on)))
    assert (move.kept.tolist(), move.parents.tolist(), move.tokens.tolist()) == ([1], [[0]], [[2]])
    assert beam.advance(ends[None]).finished
    assert beam.results == [[], [2]]


def test_a_sentence_stays_while_a_longer_hypothesis_can_still_be_the_best():
    first, unsure, on, last = [0.6, 0.3, 0.05, 0.05], [0.34, 0.01, 0.33, 0.32], [0.99, 0.01, 0, 0], [0.01, 0.99, 0, 0]
    beam = Beam([10], 2, END, 1.0)
    for rows in ([first], [unsure] * 2, [on] * 2, [on] * 2, [last] * 2):
        beam.advance(torch.tensor(rows).log())
    # one ends with log(0.3); after two tokens the other has log(0.6 * 0.34) / (7/6), which is less, and where it ends,
    # after five, log(0.6 * 0.34 * 0.99^3) / (10/6), which is more
    assert beam.results == [[0, 0, 0, 0]]


def test_logits_that_are_no_numbers_are_told():
    with pytest.raises(NonFiniteError, match="not all numbers"):
        Beam([5], 2, END).advance(torch.tensor([[0.0, math.nan]]))
