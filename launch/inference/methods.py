"""How outputs are chosen: beam search for translations, sampling for continuations, or known ones to be scored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from suite.data.text.tokenizer import BEGIN_ID, END_ID
from suite.decoding.beam import LENGTH_PENALTY, Beam
from suite.decoding.decode import Search
from suite.decoding.forced import ForcedDecoding
from suite.decoding.grouping import group_by_equal_length, group_by_length
from suite.decoding.sampling import Sampler
from suite.pipeline.model.rng import mix

Result = TypeVar("Result", int, float)
"""What is found of each token: its id, or its NLL."""
Result_co = TypeVar("Result_co", int, float, covariant=True)


class DecodingMethod(Protocol[Result_co]):
    """How tokens are chosen, and which sources are decoded together."""

    @property
    def rows(self) -> int:
        """Hypotheses of each source."""

    @property
    def first(self) -> int | None:
        """The token that outputs begin after; None continues the source."""

    def groups(self, sources: Sequence[Sequence[int]]) -> list[list[int]]:
        """Returns the indices of the sources in groups."""

    def search(self, sources: Sequence[Sequence[int]], group: Sequence[int]) -> GroupSearch[Result_co]:
        """Returns the search of a group."""


class GroupSearch(Search, Protocol[Result_co]):
    """A search that holds its results."""

    @property
    def results(self) -> Sequence[Sequence[Result_co]]:
        """Of each source: its output's tokens without special tokens, or the NLL of each known token."""


@dataclass(frozen=True)
class BeamSearch:
    """Beam search over sources of any length, for at most ``max_length`` tokens."""

    beam: int
    max_length: int
    first: int = BEGIN_ID

    @property
    def rows(self) -> int:
        return self.beam

    def groups(self, sources: Sequence[Sequence[int]]) -> list[list[int]]:
        return group_by_length(sources, self.beam)

    def search(self, sources: Sequence[Sequence[int]], group: Sequence[int]) -> Beam:
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
        return group_by_equal_length(sources)

    def search(self, sources: Sequence[Sequence[int]], group: Sequence[int]) -> Sampler:
        """A sampler, with random numbers by the prompt's number."""
        limits = [self.tokens[at] for at in group]
        return Sampler(limits, self.end, self.temperature, self.top_k, [mix(7, self.seed, at) for at in group])


@dataclass(frozen=True)
class ForcedScoring:
    """The known outputs of sources, such as their references: the result is the NLL of each token, in nats."""

    targets: Sequence[Sequence[int]]
    """Token ids of each output, its end mark included."""
    rows: int = 1
    first: int = BEGIN_ID

    def groups(self, sources: Sequence[Sequence[int]]) -> list[list[int]]:
        return group_by_length(sources, self.rows)

    def search(self, sources: Sequence[Sequence[int]], group: Sequence[int]) -> ForcedDecoding:
        return ForcedDecoding([self.targets[at] for at in group])
