"""A member of a sweep: one run, and how it is scored."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.base.experiment import Experiment
from suite.errors import RunFileError
from suite.paths import read_json


@dataclass(frozen=True)
class Scoring:
    """How to score a member's translations: beam width, test pairs per direction (None for all), and languages (None
    for all that it was trained on)."""

    beam: int
    max_pairs: int | None
    languages: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Member:
    """One run of a sweep. Members with the same label differ only in their seed."""

    folder: str
    """Below the folder of all runs, such as ``depth_width-laptop/t12_400m-0``."""
    label: str
    experiment: Experiment
    scoring: Scoring | None = None
    """None: the run's record is enough."""
    after: str | None = None
    """The folder of a member to train first, because this one starts from its weights."""
    priority: int = 0
    """Members with a higher priority run first; among equals, those that need more devices."""


def folder_name(name: str, scale: str) -> str:
    return f"{name}-{scale}" if scale else name


def read_record(folder: Path, name: str = "record.json") -> dict[str, Any] | None:
    """Returns a run's record; None without one and for a damaged one, which the report names."""
    try:
        return read_json(folder / name)
    except RunFileError:
        return None
