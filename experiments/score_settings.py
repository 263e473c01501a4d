"""What can be set of scoring: ``SET="score.beam=1 score.languages=de,fr"``."""

from __future__ import annotations

from pydantic import Field, ValidationError

from experiments import overrides
from suite.evaluation.beam import SIZE
from suite.settings import Frozen


class ScoreSettings(Frozen):
    """Which directions are scored, and how they are decoded."""

    beam: int = Field(SIZE, ge=1, description="hypotheses of a sentence; 1 is greedy")
    languages: tuple[str, ...] | None = Field(
        None, min_length=1, description="codes; otherwise all with test pairs enough"
    )
    max_pairs: int | None = Field(None, ge=1, description="test pairs of a direction at most, spread evenly")
    stages: int | None = Field(None, ge=1, description="K; otherwise the fewest that hold the weights")


class _Record(Frozen):
    score: ScoreSettings = ScoreSettings()


def read(settings: str) -> ScoreSettings:
    """Returns the settings typed by a person. Raises SettingError as an experiment's do."""
    given = overrides.parse(settings, _Record)
    try:
        return _Record.model_validate({"score": {path.removeprefix("score."): v for path, v in given.items()}}).score
    except ValidationError as fault:
        raise overrides.as_setting_error(fault, _Record) from None
