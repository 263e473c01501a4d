"""Records how a scale changed a run of the paper."""

from __future__ import annotations

from typing import Any, TypeVar

from experiments.base.experiment import Experiment
from suite.paths import hide_secrets

AnyExperiment = TypeVar("AnyExperiment", bound=Experiment)


def with_changes(paper: Experiment, chosen: AnyExperiment) -> AnyExperiment:
    """Returns ``chosen`` with every difference from the paper's numbers in ``shrunk``."""
    return chosen.model_copy(update={"shrunk": tuple(changes(paper, chosen))})


def changes(before: Experiment, after: Experiment) -> list[str]:
    """Returns a line for each setting that differs between two experiments, such as ``model.width 1024 -> 64``."""
    old, new = before.model_dump(), after.model_dump()
    sections: list[str] = [name for name, value in old.items() if isinstance(value, dict)]
    return [
        f"{section}.{field} {_short(value)} -> {_short(new[section][field])}"
        for section in sections
        for field, value in old[section].items()
        if value != new[section][field]
    ]


def _short(value: Any) -> str:
    return (
        f"{value:g}" if isinstance(value, float) else str(value).lower() if value is None else hide_secrets(str(value))
    )
