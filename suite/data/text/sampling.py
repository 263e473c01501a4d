"""Samples the pairs of a step: a pure function of (seed, step), so the step is the sampler's whole state.

Language l is drawn with p_l ~ D_l^(1/T), where D_l is its number of pairs: T = 1 keeps the corpus' proportions, a large
T draws all languages equally often. Pair and direction are uniform.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from suite.errors import DataError

_BLOCK = 256  # draws made at once


@dataclass(frozen=True, slots=True)
class Draw:
    """One pair in one direction: a row of the split, from English or to English."""

    language: int
    row: int
    from_english: bool


def temperature_weights(sizes: Sequence[int], temperature: float) -> NDArray[np.float64]:
    """Returns p_l of each language; they sum to 1, and a language without pairs gets 0.

    Raises DataError when no language has a pair.
    """
    counts = np.asarray(sizes, dtype=np.float64)
    if not counts.sum() > 0:
        raise DataError(
            f"none of {len(counts)} languages has a pair to train on; prepare the text again or use another corpus"
        )
    # dividing by the largest first avoids overflow at a small T and does not change p_l
    weights = np.power(counts / counts.max(), 1.0 / temperature)
    return weights / weights.sum()


class PairSampler:
    """Draws the pairs of a step. The rows of a split are grouped by language, ``sizes[l]`` rows for language l.

    Draws only languages in ``among``, if given, and of a language in ``chosen`` only the pairs at those places.
    """

    def __init__(
        self, sizes: Sequence[int], temperature: float, seed: int, among: Sequence[int] | None = None,
        chosen: Mapping[int, NDArray[np.int64]] | None = None,
    ) -> None:  # fmt: skip
        self._seed = seed
        self._chosen = chosen or {}
        self._sizes = np.asarray(sizes, dtype=np.int64)
        self._starts = np.cumsum(self._sizes) - self._sizes
        for language, places in self._chosen.items():
            self._sizes[language] = len(places)
        drawn = self._sizes if among is None else np.zeros_like(self._sizes)
        if among is not None:
            drawn[list(among)] = self._sizes[list(among)]
        self.weights = temperature_weights(drawn.tolist(), temperature)
        self._bounds = np.cumsum(self.weights)
        self._bounds[np.flatnonzero(drawn)[-1] :] = 1.0  # rounding must not leave a gap below 1

    def draws(self, step: int) -> Iterator[Draw]:
        """Yields an infinite sequence of draws, always the same for the same (seed, step), in O(1) per draw."""
        random = np.random.Generator(np.random.Philox(key=np.array([self._seed, step], dtype=np.uint64)))
        while True:
            language_draws, row_draws, direction_draws = random.random((3, _BLOCK))
            languages = np.searchsorted(self._bounds, language_draws, side="right")
            places = (row_draws * self._sizes[languages]).astype(np.int64)
            for language, chosen in self._chosen.items():
                of_language = languages == language
                places[of_language] = chosen[places[of_language]]
            rows = self._starts[languages] + places
            from_english = (direction_draws < 0.5).tolist()
            for draw in zip(languages.tolist(), rows.tolist(), from_english, strict=True):
                yield Draw(*draw)
