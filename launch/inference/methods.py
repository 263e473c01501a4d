"""How outputs are chosen: beam search for translations, sampling for continuations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from suite.data.text.tokenizer import BEGIN_ID, END_ID
from suite.decoding.beam import LENGTH_PENALTY, Beam
from suite.decoding.decode import Search
from suite.decoding.grouping import group_by_equal_length, group_by_length
from suite.decoding.sampling import Sampler
from suite.pipeline.model.rng import mix


class DecodingMethod(Protocol):
    """How tokens are chosen, and which sources are decoded together."""

    @property
    def rows(self) -> int:
        """Hypotheses of each source."""

    @property
    def first(self) -> int | None:
        """The token that outputs begin after; None continues the source."""

    def groups(self, sources: Sequence[Sequence[int]]) -> list[list[int]]:
        """Returns the indices of the sources in groups."""

    def search(self, sources: Sequence[Sequence[int]], group: Sequence[int]) -> GroupSearch:
        """Returns the search of a group."""


class GroupSearch(Search, Protocol):
    """A search that holds its results."""

    @property
    def results(self) -> list[list[int]]:
        """The tokens of each source, without special tokens."""


@dataclass(frozen=True)
class BeamSearch:
    """Beam search over sources of any length, for at most ``max_length`` tokens."""

    beam: int
    max_length: int
    first: int = BEGIN_ID

    @property
    def rows(self) -> int:
        """The beam."""
        return self.beam

    def groups(self, sources: Sequence[Sequence[int]]) -> list[list[int]]:
        """By similar length."""
        return group_by_length(sources, self.beam)

    def search(self, sources: Sequence[Sequence[int]], group: Sequence[int]) -> Beam:
        """A beam."""
        return Beam([self.max_length] * len(group), self.beam, END_ID, LENGTH_PENALTY)


@dataclass(frozen=True)
class Sampling:
    """A continuation of each prompt, by ``suite.decoding.sampling``."""

    tokens: tuple[int, ...]
    """The most of each prompt's continuation."""
    end: int
    temperature: float
    top_k: int | None
    seed: int
    rows: int = 1
    first: None = None

    def groups(self, sources: Sequence[Sequence[int]]) -> list[list[int]]:
        """By equal length."""
        return group_by_equal_length(sources)

    def search(self, sources: Sequence[Sequence[int]], group: Sequence[int]) -> Sampler:
        """A sampler, with random numbers by the prompt's number."""
        limits = [self.tokens[at] for at in group]
        return Sampler(limits, self.end, self.temperature, self.top_k, [mix(7, self.seed, at) for at in group])
