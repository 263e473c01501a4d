"""Settings of a pipeline as text: what a user gives, and what makes a plan that was found."""

from __future__ import annotations

import shlex
from collections.abc import Iterable

from experiments.base import overrides
from experiments.base.experiment import Experiment
from suite.settings import PipelineSettings

PIPELINE_NAMES = ("stages", "replicas", "micro_batches", "schedule", "virtual_stages", "remat")
"""The settings that a plan can choose."""


def split_pipeline_auto(settings: str) -> tuple[str, bool]:
    """Returns the settings without ``pipeline=auto``, which leaves all of this to the plan of a new run, and whether it
    is among them."""
    parts = overrides.split(settings)
    rest = [part for part in parts if part != "pipeline=auto"]
    return shlex.join(rest), len(rest) < len(parts)


def given_names(work: Experiment, given: str | Iterable[str]) -> set[str]:
    """Returns the names of the pipeline settings that a user gives."""
    return {path.removeprefix("pipeline.") for path in overrides.parse(given, type(work)) if "pipeline." in path}


def changed_settings(wanted: PipelineSettings, before: PipelineSettings) -> str:
    """Returns the settings, of those that a plan can choose, that make a pipeline of another one."""
    changed = [name for name in PIPELINE_NAMES if getattr(wanted, name) != getattr(before, name)]
    return " ".join(f"pipeline.{name}={getattr(wanted, name)}" for name in changed)


def merged(given: str, settings: str) -> str:
    """Returns the given settings, overridden by others."""
    pairs = dict(setting.partition("=")[::2] for setting in overrides.split(f"{given} {settings}"))
    return " ".join(f"{name}={shlex.quote(value)}" for name, value in pairs.items())
