"""Forced decoding: the probabilities that a model gives to known outputs, such as references.

logits of step 0 1 2       target  the file </s>       result  -log p(the)  -log p(file | the)  -log p(</s> | the file)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from suite.decoding.kv_cache import BeamUpdate
from suite.errors import NonFiniteError


class ForcedDecoding:
    """The search of one group of sources whose outputs are known."""

    def __init__(self, targets: Sequence[Sequence[int]]) -> None:
        """``targets`` are the tokens of each output, its end mark included; at least one each."""
        self._targets = targets
        self._sentences = list(range(len(targets)))  # indices in the group of those that are not done
        self.results: list[list[float]] = [[] for _ in targets]
        """The negative log probability of each target token so far, in nats."""

    def advance(self, logits: Tensor) -> BeamUpdate:
        """Continues each target after the logits (sentences, vocabulary) of its next token. Raises NonFiniteError
        unless all are finite."""
        at = len(self.results[self._sentences[0]])
        tokens = torch.tensor([self._targets[sentence][at] for sentence in self._sentences])
        index = tokens[:, None].to(logits.device, non_blocking=True)
        losses = -logits.float().log_softmax(-1).gather(-1, index)[:, 0]
        # one copy: each is a wait for the device
        *losses_of_sentences, finite = torch.cat((losses, logits.isfinite().all()[None])).tolist()
        if not finite:
            raise NonFiniteError("the model's logits are not all finite; decode an earlier checkpoint of the run")
        for sentence, loss in zip(self._sentences, losses_of_sentences, strict=True):
            self.results[sentence].append(loss)
        kept = [row for row, sentence in enumerate(self._sentences) if len(self._targets[sentence]) > at + 1]
        self._sentences = [self._sentences[row] for row in kept]
        rows = torch.tensor(kept, dtype=torch.int64)
        return BeamUpdate(rows, torch.zeros(len(kept), 1, dtype=torch.int64), tokens[rows][:, None])
