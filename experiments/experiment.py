"""One run, fully resolved: every number its result depends on, frozen, and kept beside it as ``experiment.toml``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, fields
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import BeforeValidator, ValidationError, model_validator
from torch import nn

from experiments import overrides, toml_text
from models.loss import TranslationLoss
from models.transformer import TransformerShape, layers
from suite.errors import SettingError, nearest
from suite.pipeline.partition import cell_ranges
from suite.settings import (
    Frozen,
    OptimizerSettings,
    PipelineSettings,
    TextSettings,
    TrackingSettings,
    TrainSettings,
)

Scale = Literal["paper", "laptop"]


def _checked_shape(value: Any) -> Any:
    """Has a shape's types checked again, also one made in code, and refuses fields that it does not have."""
    if isinstance(value, TransformerShape):
        return asdict(value)
    known = [field.name for field in fields(TransformerShape)]
    for name in value if isinstance(value, dict) else ():
        if name not in known:
            raise ValueError(f"unknown field {name}; {nearest(name, known)}")
    return value


class Experiment(Frozen):
    """A named run. ``text.vocabulary`` is the one place that sets the vocabulary; the model's must agree with it.

    Raises SettingError when two fields contradict each other, pydantic's ValidationError for a wrong type or name.
    """

    name: str
    scale: Scale
    model: Annotated[TransformerShape, BeforeValidator(_checked_shape)]
    text: TextSettings
    pipeline: PipelineSettings
    optimizer: OptimizerSettings
    train: TrainSettings
    tracking: TrackingSettings = TrackingSettings()
    trace: bool = False
    """Whether every step's actions are recorded; a few at the start always are."""
    shrunk: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.model.vocabulary != self.text.vocabulary:
            raise SettingError(
                f"model.vocabulary is {self.model.vocabulary} and text.vocabulary {self.text.vocabulary}; "
                "set text.vocabulary, the model follows it"
            )
        faults = self._pipeline_faults()
        if faults:
            raise SettingError("; ".join(faults))
        return self

    def _pipeline_faults(self) -> list[str]:
        """Returns all that is wrong with K and the cells by hand."""
        stages, cells, count = self.pipeline.stages, self.pipeline.cells, self.model.list_length
        faults = []
        if stages > count:
            faults.append(f"pipeline.stages is {stages}, the model has {count} layers; use 1 to {count} stages")
        if cells is not None and len(cells) != stages:
            faults.append(f"pipeline.cells names {len(cells)} cells, pipeline.stages is {stages}; make them equal")
        if cells is not None:
            try:
                cell_ranges(cells, count)
            except SettingError as fault:
                faults.append(str(fault))
        return faults

    def build(self) -> tuple[list[nn.Module], nn.Module]:
        """Returns the layers, without memory (on the meta device), and the loss."""
        with torch.device("meta"):
            return layers(self.model), TranslationLoss(self.model.label_smoothing)

    def with_settings(self, settings: str | Iterable[str]) -> Experiment:
        """Returns a copy with ``field=value`` settings, such as ``"train.steps=50 pipeline.stages=4"``, applied.

        Setting ``text.vocabulary`` sets the model's with it. Raises SettingError naming the field, the type it takes
        and what was given, or the nearest fields to an unknown one.
        """
        given = overrides.parse(settings, Experiment)
        if "text.vocabulary" in given:
            given.setdefault("model.vocabulary", given["text.vocabulary"])
        values = self.model_dump()
        for path, value in given.items():
            section, _, field = path.partition(".")
            if field:
                values[section][field] = value
            else:
                values[section] = value
        return _validated(values)

    def to_toml(self) -> str:
        """Returns the record as TOML; a field that is None is left out."""
        return toml_text.write(self.model_dump())

    @classmethod
    def from_toml(cls, text: str) -> Experiment:
        """Reads what ``to_toml`` wrote, exactly: a field left out that may be None is None, whatever its default.

        Raises SettingError when the text is no TOML or no experiment.
        """
        values = toml_text.read(text)
        for path, kind in overrides.paths(cls).items():
            section, _, field = path.partition(".")
            if overrides.may_be_none(kind) and isinstance(values.get(section), dict):
                values[section].setdefault(field, None)
        return _validated(values)


def _validated(values: dict[str, Any]) -> Experiment:
    """Returns the experiment, or raises SettingError for the first fault."""
    try:
        return Experiment.model_validate(values)
    except ValidationError as fault:
        raise overrides.as_setting_error(fault, Experiment) from None
