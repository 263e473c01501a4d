"""Samples the pairs of a step: a pure function of (seed, step), so the step is the sampler's whole state.

Language l is drawn with p_l ~ D_l^(1/T), where D_l is its number of pairs: T = 1 keeps the corpus' proportions, a large
T draws all languages equally often. Pair and direction are uniform.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from suite.errors import DataError

_BLOCK = 256  # random numbers come in blocks of draws: the first n of a longer request are those of a request for n


@dataclass(frozen=True, slots=True)
class Draws:
    """Pairs in one direction each, as arrays: the language, the pair's index in the split, whether from English."""

    languages: NDArray[np.int64]
    pair_indices: NDArray[np.int64]
    from_english: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.pair_indices)

    def __getitem__(self, places: Any) -> Draws:
        return Draws(self.languages[places], self.pair_indices[places], self.from_english[places])


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
        self,
        sizes: Sequence[int],
        temperature: float,
        seed: int,
        among: Sequence[int] | None = None,
        chosen: Mapping[int, NDArray[np.int64]] | None = None,
    ) -> None:
        self._seed = seed
        self._chosen = chosen or {}
        self._sizes = np.asarray(sizes, dtype=np.int64)
        self._starts = np.cumsum(self._sizes) - self._sizes
        for language, places in self._chosen.items():
            self._sizes[language] = len(places)
        is_drawn = np.isin(np.arange(len(sizes)), range(len(sizes)) if among is None else list(among))
        drawn = np.where(is_drawn, self._sizes, 0)
        self.weights = temperature_weights(drawn.tolist(), temperature)
        self._bounds = np.cumsum(self.weights)
        self._bounds[np.flatnonzero(drawn)[-1] :] = 1.0  # rounding must not leave a gap below 1

    def draws(self, step: int, count: int) -> Draws:
        """Returns the first ``count`` draws of an infinite sequence, which (seed, step) determine, in O(1) per draw."""
        random = np.random.Generator(np.random.Philox(key=np.array([self._seed, step], dtype=np.uint64)))
        numbers = random.random((-(-count // _BLOCK), 3, _BLOCK)).swapaxes(0, 1).reshape(3, -1)[:, :count]
        languages = np.searchsorted(self._bounds, numbers[0], side="right")
        places = (numbers[1] * self._sizes[languages]).astype(np.int64)
        for language, chosen in self._chosen.items():
            of_language = languages == language
            places[of_language] = chosen[places[of_language]]
        return Draws(languages, self._starts[languages] + places, numbers[2] < 0.5)
