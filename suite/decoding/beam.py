r"""Beam search over many sentences at once: chooses which hypotheses continue and which is best.

    size 3      <s> -- a -- ad ...      the 3 best extensions of a sentence's live hypotheses continue; one that ends
                  \-- b -- bc -> END    takes one of these slots and is not extended ("removed from the beam",
                  \-- c -> END          Sutskever et al. 2014, section 3.2): so a beam of 1 is greedy decoding

The result is the ended hypothesis with the best log probability / ((5 + length) / 6)^penalty, GNMT's normalisation
(Wu et al. 2016, equation 14; 0.6 and a beam of 4 are the values of "Attention is all you need", section 6.1). The end
mark counts as a token. A hypothesis also ends, without mark, at its sentence's limit. A sentence is done, and leaves
the batch, when no live hypothesis can beat the best ended one: log probabilities only decrease and the divisor is
largest at the limit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from suite.decoding.kv_cache import BeamUpdate
from suite.errors import NonFiniteError

SIZE, LENGTH_PENALTY = 4, 0.6


class Beam:
    """The search of one group of sentences. Its tensors are on the host; only the best extensions come from the device
    of the logits, in one copy a token: each copy is a wait for the device."""

    def __init__(self, limits: Sequence[int], size: int, end: int, length_penalty: float = LENGTH_PENALTY) -> None:
        """``limits`` are the most tokens of each sentence's result, including its ``end`` mark; at least 1."""
        self._size, self._end, self._penalty = size, end, length_penalty
        self._limits = torch.tensor(limits)
        self._sentences = list(range(len(limits)))  # indices in the group of the sentences that are not done
        self._scores = torch.zeros(len(limits), 1)
        self._tokens = torch.empty(len(limits), 1, 0, dtype=torch.int64)
        self._best = torch.full((len(limits),), -torch.inf)  # of the sentences that are not done
        self.results: list[list[int]] = [[] for _ in limits]
        """The best result of each sentence so far, without its end mark."""
        self.scores = [-torch.inf] * len(limits)
        """The normalised log probability of each."""

    def advance(self, logits: Tensor) -> BeamUpdate:
        """Processes the logits (sentences * hypotheses, vocabulary) of each hypothesis's last token and returns how the
        group continues. Raises NonFiniteError for NaN.
        """
        sentences, hypotheses = self._scores.shape
        before = self._scores[..., None].to(logits.device, non_blocking=True)
        log_probabilities = logits.float().log_softmax(-1).view(sentences, hypotheses, -1) + before
        words = log_probabilities.shape[-1]
        best = log_probabilities.flatten(1).topk(min(self._size, hypotheses * words))
        on_host = torch.stack((best.values.double(), best.indices.double())).cpu()  # fp64 holds both exactly
        scores, places = on_host[0].float(), on_host[1].long()
        if scores.isnan().any():  # NaN is the largest to topk
            raise NonFiniteError("the model's logits are not all numbers; decode an earlier checkpoint of the run")
        parents, tokens = places // words, places % words
        past = self._tokens.gather(1, parents[..., None].expand(-1, -1, self._tokens.shape[2]))
        self._tokens = torch.cat((past, tokens[..., None]), dim=2)
        self._scores = self._without_ended(scores, tokens)
        reachable = self._scores.amax(1) / self._divisor(self._limits)
        remaining = (reachable > self._best).nonzero().flatten()  # in which a live hypothesis can still be best
        self._sentences = [self._sentences[at] for at in remaining.tolist()]
        self._limits, self._best = self._limits[remaining], self._best[remaining]
        self._scores, self._tokens = self._scores[remaining], self._tokens[remaining]
        return BeamUpdate(remaining, parents[remaining], tokens[remaining])

    def _without_ended(self, scores: Tensor, tokens: Tensor) -> Tensor:
        """Returns the scores of live hypotheses and -inf for ended ones; records the best of these."""
        length = self._tokens.shape[2]
        ended = (tokens == self._end) | (self._limits <= length)[:, None]
        best, best_hypothesis = torch.where(ended, scores / self._divisor(torch.tensor(length)), -torch.inf).max(1)
        for at in (best > self._best).nonzero().flatten().tolist():
            result = self._tokens[at, best_hypothesis[at]].tolist()
            self.results[self._sentences[at]] = result[:-1] if result[-1] == self._end else result
            self.scores[self._sentences[at]] = float(best[at])
        self._best = torch.maximum(best, self._best)
        return scores.masked_fill(ended, -torch.inf)

    def _divisor(self, length: Tensor) -> Tensor:
        return ((5 + length) / 6) ** self._penalty
