"""Samples a continuation of each prompt: one token at a time, until the end token or the last token asked for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from suite.decoding.kv_cache import BeamUpdate
from suite.errors import NonFiniteError


class Sampler:
    """The search of one group of prompts, with one hypothesis each.

    Each prompt has its own random numbers, from ``seeds``: its tokens depend neither on the other prompts nor on K.
    """

    def __init__(
        self, limits: Sequence[int], end: int, temperature: float, top_k: int | None, seeds: Sequence[int]
    ) -> None:
        """``limits`` are the most tokens of each result. ``temperature`` divides the logits; at 0 the most probable
        token is taken. ``top_k`` leaves only that many of the most probable tokens."""
        self._limits, self._end, self._temperature, self._top_k = limits, end, temperature, top_k
        self._generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self._prompts = list(range(len(limits)))  # indices in the group of those that are not done
        self.results: list[list[int]] = [[] for _ in limits]
        """The tokens of each prompt's continuation so far, without its end token."""

    def advance(self, logits: Tensor) -> BeamUpdate:
        """Chooses a token of each prompt from logits (prompts, vocabulary). Raises NonFiniteError unless all are
        finite."""
        logits = logits.float().cpu()  # the only wait for the device
        if not logits.isfinite().all():
            raise NonFiniteError("the model's logits are not all finite; decode an earlier checkpoint of the run")
        tokens = self._choose(logits)
        kept = []
        for at, (prompt, token) in enumerate(zip(self._prompts, tokens.tolist(), strict=True)):
            if token == self._end:
                continue
            self.results[prompt].append(token)
            if len(self.results[prompt]) < self._limits[prompt]:
                kept.append(at)
        self._prompts = [self._prompts[at] for at in kept]
        rows = torch.tensor(kept, dtype=torch.int64)
        return BeamUpdate(rows, torch.zeros(len(kept), 1, dtype=torch.int64), tokens[rows][:, None])

    def _choose(self, logits: Tensor) -> Tensor:
        if self._temperature == 0:
            return logits.argmax(-1)
        # differences to the largest, in fp64: a small temperature must not overflow
        logits = (logits - logits.max(-1, keepdim=True).values).double() / self._temperature
        if self._top_k is not None and self._top_k < logits.shape[-1]:
            least = logits.topk(self._top_k).values[:, -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        shares = logits.softmax(-1)
        chosen = [
            torch.multinomial(share, 1, generator=self._generators[prompt])
            for share, prompt in zip(shares, self._prompts, strict=True)
        ]
        return torch.cat(chosen)
