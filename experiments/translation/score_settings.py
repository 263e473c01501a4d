"""Settings of scoring: ``SET="score.beam=1 score.languages=de,fr"``."""

from __future__ import annotations

from typing import Annotated

from annotated_types import Unit
from pydantic import Field, ValidationError

from experiments.base import overrides
from suite.decoding.beam import SIZE
from suite.settings import FrozenRecord


class ScoreSettings(FrozenRecord):
    """Which directions to score, and how to decode."""

    beam: int = Field(SIZE, ge=1)
    """Hypotheses per sentence; 1 is greedy decoding."""
    languages: tuple[str, ...] | None = Field(None, min_length=1)
    """Languages scored; none: all with enough test pairs."""
    max_pairs: Annotated[int | None, Unit("pairs")] = Field(None, ge=1)
    """Most test pairs per direction, evenly spaced over the test text; none: all."""
    stages: int | None = Field(None, ge=1)
    """K while decoding; none: the fewest stages that hold the weights."""


class ScoreRecord(FrozenRecord):
    """What ``SET=`` can set of scoring."""

    score: ScoreSettings = ScoreSettings()


def read(settings: str) -> ScoreSettings:
    """Parses the user's settings. Raises SettingError like an experiment's settings."""
    given = overrides.parse(settings, ScoreRecord)
    try:
        return ScoreRecord.model_validate(
            {"score": {path.removeprefix("score."): v for path, v in given.items()}}
        ).score
    except ValidationError as fault:
        raise overrides.as_setting_error(fault, ScoreRecord) from None
