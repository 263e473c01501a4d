"""Rows of tokens for the workers of a language model's run."""

from __future__ import annotations

import torch

from experiments.base.data_source import TokenSource, labels
from suite.data.documents.batches import RowBatches
from suite.data.documents.tokenizer import token_bytes
from suite.data.documents.tokens import TokenData
from suite.evaluation.ngram import ngram_nll
from suite.training.validation import HeldOut

ORDERS = {"trigram": 3, "bigram": 2, "unigram": 1}
"""The n-gram models that a language model is compared with."""


class DocumentSource(TokenSource):
    """Rows of tokens for the first stage, the same one token later for the last."""

    data_type, batches_type = TokenData, RowBatches
    _data: TokenData
    _batches: RowBatches | None = None

    def counts(self) -> dict[str, int]:
        return self._data.counts

    def baselines(self, held_out: HeldOut) -> dict[str, float]:
        """N-gram models of the training tokens, on the same labels."""
        assert self._batches is not None
        rows = self._batches.held_out_ids()
        scores = ngram_nll(self._data.train, rows, len(self._data.tokenizer), ORDERS.values())
        return dict(zip(ORDERS, scores, strict=True))

    def bytes_per_unit(self, held_out: HeldOut) -> float:
        """The bytes of a label; end tokens have none."""
        tokens = torch.cat([label.flatten() for label in labels(held_out)])
        return float(token_bytes(self._data.tokenizer)[tokens.numpy()].mean())
