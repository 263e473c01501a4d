"""One run, fully resolved: every number its result depends on, frozen, and kept beside it as ``experiment.toml``.

What runs have in common stands here; what a run on text or on images has beside it, in ``text_experiment`` and
``image_experiment``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, fields
from typing import Any, ClassVar, Literal, Self

from pydantic import ValidationError, model_validator
from torch import nn

from experiments import overrides, toml_text
from suite.errors import SettingError, nearest
from suite.pipeline import recipe
from suite.pipeline.partition import cell_ranges
from suite.settings import Frozen, LoopSettings, OptimizerSettings, PipelineSettings, TrackingSettings

Scale = Literal["paper", "laptop", "tiny"]


def checked_shape(kind: type) -> Any:
    """Returns what has a model shape's types checked again, also one made in code, and refuses fields it has not."""
    known = [field.name for field in fields(kind)]

    def check(value: Any) -> Any:
        if isinstance(value, kind):
            return asdict(value)  # type: ignore[call-overload]
        for name in value if isinstance(value, dict) else ():
            if name not in known:
                raise ValueError(f"unknown field {name}; {nearest(name, known)}")
        return value

    return check


class Experiment(Frozen):
    """A named run, whatever its task.

    Raises SettingError when two fields contradict each other, pydantic's ValidationError for a wrong type or name.
    """

    unit: ClassVar[str]
    """What a mini-batch counts: tokens or images."""
    measure: ClassVar[str]
    """What the loss reports beside its objective, a unit: nll or accuracy."""
    fixed: ClassVar[tuple[str, ...]]
    """Sections that a resumed run keeps: the model and the data."""

    name: str
    scale: Scale
    pipeline: PipelineSettings
    optimizer: OptimizerSettings
    train: LoopSettings
    tracking: TrackingSettings = TrackingSettings()
    trace: bool = False
    """Whether every step's actions are recorded; a few at the start always are."""
    shrunk: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _agree(self) -> Self:
        faults = [*self.faults(), *self._pipeline_faults()]
        if faults:
            raise SettingError("; ".join(faults))
        return self

    def faults(self) -> list[str]:
        """Returns all in which the task's own fields contradict each other."""
        return []

    @property
    @abstractmethod
    def list_length(self) -> int:
        """Layers of the model."""

    @property
    @abstractmethod
    def batch(self) -> int:
        """Units of a mini-batch over all replicas, about."""

    @property
    @abstractmethod
    def data(self) -> str:
        """The name of the text or image set."""

    @abstractmethod
    def with_data(self, name: str) -> Self:
        """Returns a copy on another text or image set."""

    @abstractmethod
    def build(self) -> tuple[list[nn.Module], nn.Module]:
        """Returns the layers, without memory (on the meta device), and the loss."""

    def _pipeline_faults(self) -> list[str]:
        """Returns all that is wrong with K, the schedule and the cells by hand."""
        stages, cells, count = self.pipeline.stages, self.pipeline.cells, self.list_length
        faults = recipe.faults(self.pipeline, count)
        if stages > count:
            faults.append(f"pipeline.stages is {stages}, the model has {count} layers; use 1 to {count} stages")
        if cells is not None and len(cells) != stages * self.pipeline.turns:
            held = f" of {self.pipeline.turns} cells each" if self.pipeline.turns > 1 else ""
            faults.append(
                f"pipeline.cells names {len(cells)} cells, pipeline.stages is {stages}{held}; make them equal"
            )
        if cells is not None:
            try:
                cell_ranges(cells, count)
            except SettingError as fault:
                faults.append(str(fault))
        return faults

    def with_settings(self, settings: str | Iterable[str]) -> Self:
        """Returns a copy with ``field=value`` settings, such as ``"train.steps=50 pipeline.stages=4"``, applied.

        Raises SettingError naming the field, the type it takes and what was given, or the nearest fields to an unknown
        one.
        """
        given = self.completed(overrides.parse(settings, type(self)))
        values = self.model_dump()
        for path, value in given.items():
            section, _, field = path.partition(".")
            if field:
                values[section][field] = value
            else:
                values[section] = value
        return self.validated(values)

    def completed(self, given: dict[str, Any]) -> dict[str, Any]:
        """Returns settings with those that follow from them: a cosine ends with the run."""
        decay = given.get("optimizer.decay", self.optimizer.decay)
        if decay == "cosine" and "optimizer.decay_steps" not in given:
            steps = given.get("train.steps", self.train.steps)
            warmup = given.get("optimizer.warmup_steps", self.optimizer.warmup_steps)
            with suppress(ValueError):  # no number: told when the settings are read
                given = {**given, "optimizer.decay_steps": max(1, int(steps) - int(warmup))}
        return given

    def to_toml(self) -> str:
        """Returns the record as TOML; a field that is None is left out."""
        return toml_text.write(self.model_dump())

    @classmethod
    def validated(cls, values: dict[str, Any]) -> Self:
        """Returns the experiment of these values, or raises SettingError for each fault."""
        try:
            return cls.model_validate(values)
        except ValidationError as fault:
            raise overrides.as_setting_error(fault, cls) from None

    @classmethod
    def restored(cls, values: dict[str, Any]) -> Self:
        """Returns what was written: a field left out that may be None is None, whatever its default."""
        for path, kind in overrides.paths(cls).items():
            section, _, field = path.partition(".")
            if overrides.may_be_none(kind) and isinstance(values.get(section), dict):
                values[section].setdefault(field, None)
        return cls.validated(values)
