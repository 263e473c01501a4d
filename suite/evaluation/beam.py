r"""Beam search over many sentences at once: which hypotheses go on, and which is best. Where logits come from is not
its business.

    size 3      <s> -- a -- ad ...      the 3 best extensions of all that is alive in a sentence go on; one that ends
                  \-- b -- bc -> END    takes one of these places and is not extended ("removed from the beam",
                  \-- c -> END          Sutskever et al. 2014, section 3.2): so a beam of 1 is greedy decoding

Of what ended the best by log probability / ((5 + length) / 6)^penalty is the result: the length normalisation of GNMT
(Wu et al. 2016, equation 14; 0.6 and a beam of 4 are the values of "Attention is all you need", section 6.1). The end
mark counts as a token. A hypothesis also ends, without mark, at its sentence's limit. A sentence is done, and leaves
the batch, when nothing alive can still beat what ended: log probabilities only fall and the divisor is largest at the
limit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from suite.errors import NumbersError
from suite.pipeline.incremental import Move

SIZE, LENGTH_PENALTY = 4, 0.6


class Beam:
    """The search of one group of sentences. Tensors are on the device of the logits."""

    def __init__(self, limits: Sequence[int], size: int, end: int, length_penalty: float = LENGTH_PENALTY) -> None:
        """``limits`` are the most tokens of each sentence's result, its ``end`` mark included; 1 or more."""
        self._size, self._end, self._penalty = size, end, length_penalty
        self._limits = torch.tensor(limits)
        self._where = list(range(len(limits)))  # the group's places of the sentences that are left
        self._scores = torch.zeros(len(limits), 1)
        self._tokens = torch.empty(len(limits), 1, 0, dtype=torch.int64)
        self._best = torch.full((len(limits),), -torch.inf)  # of those left
        self.results: list[list[int]] = [[] for _ in limits]
        """The best result of each sentence so far, its end mark left out."""
        self.scores = [-torch.inf] * len(limits)
        """The normalised log probability of each."""

    def advance(self, logits: Tensor) -> Move:
        """Takes the logits (sentences * hypotheses, vocabulary) of the last token of each hypothesis, and returns how
        the group goes on. Raises NumbersError when one is not a number.
        """
        self._to(logits.device)
        sentences, hypotheses = self._scores.shape
        total = logits.float().log_softmax(-1).view(sentences, hypotheses, -1) + self._scores[..., None]
        if total.isnan().any():
            raise NumbersError("the model's logits are not all numbers; decode an earlier checkpoint of the run")
        words = total.shape[-1]
        scores, places = total.flatten(1).topk(min(self._size, hypotheses * words))
        parents, tokens = places // words, places % words
        past = self._tokens.gather(1, parents[..., None].expand(-1, -1, self._tokens.shape[2]))
        self._tokens = torch.cat((past, tokens[..., None]), dim=2)
        self._scores = self._without_ended(scores, tokens)
        kept = self._open()
        self._keep(kept)
        return Move(kept, parents[kept], tokens[kept])

    def _without_ended(self, scores: Tensor, tokens: Tensor) -> Tensor:
        """Returns the scores of what is alive, -inf for what ended, of which the best is remembered."""
        length = self._tokens.shape[2]
        ended = (tokens == self._end) | (self._limits <= length)[:, None]
        best, place = torch.where(ended, scores / self._divisor(torch.tensor(length)), -torch.inf).max(1)
        for at in (best > self._best).nonzero().flatten().tolist():
            found = self._tokens[at, place[at]].tolist()
            self.results[self._where[at]] = found[:-1] if found[-1] == self._end else found
            self.scores[self._where[at]] = float(best[at])
        self._best = torch.maximum(best, self._best)
        return scores.masked_fill(ended, -torch.inf)

    def _open(self) -> Tensor:
        """Returns the places of the sentences in which something alive can still be best."""
        reachable = self._scores.amax(1) / self._divisor(self._limits)
        return (reachable > self._best).nonzero().flatten()

    def _keep(self, kept: Tensor) -> None:
        self._where = [self._where[at] for at in kept.tolist()]
        self._limits, self._best = self._limits[kept], self._best[kept]
        self._scores, self._tokens = self._scores[kept], self._tokens[kept]

    def _divisor(self, length: Tensor) -> Tensor:
        return ((5 + length) / 6) ** self._penalty

    def _to(self, device: torch.device) -> None:
        for name in ("_limits", "_scores", "_tokens", "_best"):
            setattr(self, name, getattr(self, name).to(device))


def search(beam: Beam, logits: Tensor, extend: Callable[[Move], Tensor]) -> list[list[int]]:
    """Runs a search to its end, from the first logits (sentences, vocabulary) and what makes those after a move."""
    move = beam.advance(logits)
    while not move.over:
        move = beam.advance(extend(move))
    return beam.results
