"""How outputs are chosen: beam search for translations, sampling for continuations, or known ones to be scored.

A method has ``rows`` hypotheses of each source, and the token ``first`` that outputs begin after; None continues the
source. ``groups`` returns the numbers of the sources that are decoded together, ``search`` the search of a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from suite.data.text.tokenizer import BEGIN_ID, END_ID
from suite.decoding.beam import LENGTH_PENALTY, Beam
from suite.decoding.forced import ForcedDecoding
from suite.decoding.grouping import group_by_equal_length, group_by_length
from suite.decoding.sampling import Sampler
from suite.errors import SettingError
from suite.pipeline.model.rng import mix


@dataclass(frozen=True)
class BeamSearch:
    """Beam search over sources of any length, for at most ``max_length`` tokens."""

    rows: int
    max_length: int
    first: int = BEGIN_ID

    def groups(self, sources: Sequence[Sequence[int]]) -> list[list[int]]:
        return group_by_length(sources, self.rows)

    def search(self, group: Sequence[int]) -> Beam:
        return Beam([self.max_length] * len(group), self.rows, END_ID, LENGTH_PENALTY)


@dataclass(frozen=True)
class Request:
    """How a user wants prompts to be continued."""

    tokens: int | None = None
    """The most tokens of a continuation; None: as many as fit the row."""
    temperature: float = 0.0
    """Divides the logits; 0 takes the most probable token."""
    top_k: int | None = None
    """Samples among so many of the most probable tokens; None: among all."""
    seed: int = 0

    def check(self) -> None:
        """Raises SettingError with all impossible values."""
        errors = [
            f"--{name} is {value}; it must be {least:g} or more"
            for name, value, least in (
                ("tokens", self.tokens, 1),
                ("temperature", self.temperature, 0.0),
                ("top-k", self.top_k, 1),
                ("seed", self.seed, 0),
            )
            if value is not None and not value >= least
        ]
        if self.top_k is not None and self.temperature == 0:
            errors.append(f"--top-k is {self.top_k} and --temperature 0 takes the most probable token; set both")
        if errors:
            raise SettingError("; ".join(errors))


@dataclass(frozen=True)
class Sampling:
    """A continuation of each prompt, by ``suite.decoding.sampling``."""

    limits: Sequence[int]
    """The most tokens of each prompt's continuation."""
    end: int
    request: Request
    rows: int = 1
    first: None = None

    def groups(self, sources: Sequence[Sequence[int]]) -> list[list[int]]:
        return group_by_equal_length(sources)

    def search(self, group: Sequence[int]) -> Sampler:
        """A sampler, with random numbers by the prompt's number."""
        limits, asked = [self.limits[at] for at in group], self.request
        seeds = [mix(7, asked.seed, at) for at in group]
        return Sampler(limits, self.end, asked.temperature, asked.top_k, seeds)


@dataclass(frozen=True)
class ForcedScoring:
    """The known outputs of sources, such as their references: the result is the NLL of each token, in nats."""

    targets: Sequence[Sequence[int]]
    """Token ids of each output, its end mark included."""
    rows: int = 1
    first: int = BEGIN_ID

    def groups(self, sources: Sequence[Sequence[int]]) -> list[list[int]]:
        return group_by_length(sources, self.rows)

    def search(self, group: Sequence[int]) -> ForcedDecoding:
        return ForcedDecoding([self.targets[at] for at in group])


DecodingMethod = BeamSearch | Sampling | ForcedScoring
