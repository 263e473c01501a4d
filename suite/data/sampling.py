"""Which pairs a step trains on: a pure function of (seed, step), so that its state is one integer.

Language l is drawn with p_l ~ D_l^(1/T), D_l its number of pairs: T = 1 keeps the proportions of the corpus, a large T
draws all languages alike. A pair of the language is drawn evenly, and either direction half of the time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from suite.errors import DataError

_BLOCK = 256  # draws made at once


@dataclass(frozen=True, slots=True)
class Draw:
    """One pair in one direction: row ``row`` of the split, English to the other language or back."""

    language: int
    row: int
    from_english: bool


def temperature_weights(sizes: Sequence[int], temperature: float) -> NDArray[np.float64]:
    """Returns p_l of each language, summing to 1; a language without pairs gets 0.

    Raises DataError when there is no pair at all.
    """
    counts = np.asarray(sizes, dtype=np.float64)
    if not counts.sum() > 0:
        raise DataError(f"there is no pair to draw in {len(counts)} languages; prepare the text again or take another")
    # Divided by the largest first: a small T would overflow, and p_l does not change.
    weights = np.power(counts / counts.max(), 1.0 / temperature)
    return weights / weights.sum()


class PairSampler:
    """Draws the pairs of a step. Rows of a split lie together by language: ``sizes[l]`` of them for language l.

    With ``among`` only these languages are drawn.
    """

    def __init__(self, sizes: Sequence[int], temperature: float, seed: int, among: Sequence[int] | None = None) -> None:
        self._seed = seed
        self._sizes = np.asarray(sizes, dtype=np.int64)
        self._starts = np.cumsum(self._sizes) - self._sizes
        drawn = self._sizes if among is None else np.zeros_like(self._sizes)
        if among is not None:
            drawn[list(among)] = self._sizes[list(among)]
        self.weights = temperature_weights(drawn.tolist(), temperature)
        self._bounds = np.cumsum(self.weights)
        self._bounds[np.flatnonzero(drawn)[-1] :] = 1.0  # rounding must not leave a gap below 1

    def draws(self, step: int) -> Iterator[Draw]:
        """Yields draws for ever; the same (seed, step) always yields the same ones. Cost: O(1) a draw."""
        random = np.random.Generator(np.random.Philox(key=np.array([self._seed, step], dtype=np.uint64)))
        while True:
            where, which, way = random.random((3, _BLOCK))
            languages = np.searchsorted(self._bounds, where, side="right")
            rows = self._starts[languages] + (which * self._sizes[languages]).astype(np.int64)
            for language, row, forward in zip(languages.tolist(), rows.tolist(), (way < 0.5).tolist(), strict=True):
                yield Draw(language, row, forward)
