"""Sampling: shares of the tokens drawn, top-k, the end of each prompt, and its own random numbers."""

import pytest
import torch

from suite.decoding.grouping import HYPOTHESES, group_by_equal_length
from suite.decoding.sampling import Sampler
from suite.errors import NonFiniteError

END = 0


def drawn(logits, count, temperature, top_k=None):
    """Returns the share of each token among ``count`` first tokens."""
    sampler = Sampler([1] * count, 99, temperature, top_k, range(count))
    assert sampler.advance(torch.tensor([logits] * count)).finished
    return torch.bincount(torch.tensor(sampler.results).flatten(), minlength=len(logits)) / count


def test_tokens_are_drawn_with_the_probabilities_of_the_divided_logits():
    logits = [0.0, 1.0, 2.0, -1.0]
    for temperature in (0.5, 2.0):
        expected = (torch.tensor(logits) / temperature).softmax(-1)
        torch.testing.assert_close(drawn(logits, 4000, temperature), expected, atol=0.03, rtol=0)
    two = torch.tensor(logits[1:3]).softmax(-1)
    torch.testing.assert_close(drawn(logits, 4000, 1.0, 2)[1:3], two, atol=0.03, rtol=0)
    assert drawn(logits, 4000, 1.0, 2)[[0, 3]].sum() == 0
    assert drawn(logits, 10, 0.0).tolist() == [0, 0, 1, 0]
    assert drawn(logits, 10, 1e-300).tolist() == [0, 0, 1, 0]  # logits / temperature would overflow
    assert drawn(logits, 200, 1.0, 9).count_nonzero() == 4  # more than there are


def test_a_prompt_ends_at_its_end_token_or_limit_and_the_others_continue():
    sampler = Sampler([3, 1, 3], END, 0.0, None, [0, 0, 0])
    update = sampler.advance(torch.eye(4)[[1, 2, 3]])
    assert (update.kept.tolist(), update.parents.tolist(), update.tokens.tolist()) == ([0, 2], [[0], [0]], [[1], [3]])
    update = sampler.advance(torch.eye(4)[[END, 2]])
    assert (update.kept.tolist(), update.tokens.tolist()) == ([1], [[2]])
    assert sampler.advance(torch.eye(4)[[1]]).finished
    assert sampler.results == [[1], [2], [3, 2, 1]]
    with pytest.raises(NonFiniteError):
        Sampler([1], END, 0.0, None, [0]).advance(torch.full((1, 3), torch.nan))
    with pytest.raises(NonFiniteError):
        Sampler([1], END, 1.0, None, [0]).advance(torch.tensor([[0.0, torch.inf]]))


def test_a_prompts_tokens_do_not_depend_on_the_others():
    logits = torch.randn(5, 3, 50, generator=torch.Generator().manual_seed(0))
    together, alone = Sampler([5] * 3, 99, 1.0, None, [4, 5, 6]), Sampler([5], 99, 1.0, None, [5])
    for step in logits:
        together.advance(step)
        alone.advance(step[1:2])
    assert alone.results[0] == together.results[1] != together.results[0]


def test_groups_have_one_length_and_a_bounded_size():
    sources = [[1] * length for length in [3, 2, 3, 5] + [4] * (HYPOTHESES + 1)]
    groups = group_by_equal_length(sources)
    assert sorted(at for group in groups for at in group) == list(range(len(sources)))
    assert all(len({len(sources[at]) for at in group}) == 1 for group in groups)
    assert [len(group) for group in groups] == [1, HYPOTHESES, 1, 2, 1]
