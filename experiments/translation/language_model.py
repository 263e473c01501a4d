"""``transformer_<L>``: Table 1's language model at any depth, to plan and time. It has no text to train on."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Annotated

import torch
from annotated_types import Unit
from pydantic import Field, ValidationError
from torch import nn

from experiments.base import overrides
from experiments.base.workload import sample_shapes, update_key
from experiments.translation.workload import random_ids
from models.language_model import LanguageModelShape, layers
from models.loss import TranslationLoss
from suite.pipeline.planning.profile import MicroBatch, Sample
from suite.settings import FrozenRecord, OptimizerSettings, PipelineSettings

BATCH = 32
"""Sequences of a mini-batch (Table 1)."""

STEPS = 100_000
"""Ours: the paper prints no number of steps for these models."""


class BatchSettings(FrozenRecord):
    """Size and number of the mini-batches."""

    sequences: Annotated[int, Unit("sequences")] = Field(BATCH, ge=1)
    """Sequences of one mini-batch over all replicas."""
    steps: Annotated[int, Unit("steps")] = Field(STEPS, ge=1)
    """Length of the planned run."""


class LanguageModelSettings(FrozenRecord):
    """The ``SET=`` settings of a language model's plan."""

    pipeline: PipelineSettings
    optimizer: OptimizerSettings
    batch: BatchSettings


@dataclass(frozen=True)
class LanguageModel:
    """Transformer-L of Table 1. M is 32, micro-batches of one sequence, unless set, for the least memory per stage."""

    shape: LanguageModelShape
    pipeline: PipelineSettings
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    sequences: int = BATCH
    steps: int = STEPS

    @property
    def name(self) -> str:
        """``transformer_<L>``."""
        return f"transformer_{self.shape.layers}"

    @property
    def examples(self) -> int:
        """Sequences of a step."""
        return self.sequences

    @property
    def most_rows(self) -> int | None:
        """Sequences of a step."""
        return self.sequences

    @property
    def batch(self) -> int:
        """Tokens of a step."""
        return self.sequences * self.shape.time

    @property
    def unit(self) -> str:
        """Tokens of text."""
        return "tokens"

    @property
    def threads(self) -> int | None:
        """None: cores / stages."""
        return None

    def build(self) -> tuple[list[nn.Module], nn.Module]:
        """The layers, on the meta device, and the plain loss."""
        with torch.device("meta"):
            return layers(self.shape), TranslationLoss(label_smoothing=0.0)

    def sample(self) -> Sample:
        """Full sequences: all micro-batches are equal."""
        rows = -(-self.sequences // (self.pipeline.replicas * self.pipeline.micro_batches))
        ids = random_ids(rows, self.shape.time, self.shape.vocabulary)
        micro_batch = MicroBatch((ids,), (ids,))
        return Sample(micro_batch, micro_batch)

    def key(self) -> str:
        """Costs depend on the shape, the rows of a micro-batch and the update."""
        return repr((self.shape, sample_shapes(self.sample()), update_key(self.optimizer)))

    def setting_errors(self) -> list[str]:
        """No faults: no settings can contradict each other."""
        return []

    def with_pipeline(self, pipeline: PipelineSettings) -> LanguageModel:
        """A copy."""
        return replace(self, pipeline=pipeline)

    def with_share(self, share: float) -> tuple[LanguageModel, str]:
        """With fewer sequences per mini-batch."""
        sequences = max(1, int(self.sequences * share))
        return replace(self, sequences=sequences), f"batch.sequences={sequences}"

    def with_settings(self, settings: str) -> LanguageModel:
        """Returns a copy with settings such as ``"pipeline.stages=8 optimizer.precision=bf16"`` applied.

        Raises SettingError for an unknown or invalid setting.
        """
        batch = BatchSettings(sequences=self.sequences, steps=self.steps)
        record = LanguageModelSettings(pipeline=self.pipeline, optimizer=self.optimizer, batch=batch)
        values = record.model_dump()
        for path, value in overrides.parse(settings, LanguageModelSettings).items():
            section, _, name = path.partition(".")
            values[section][name] = value
        try:
            chosen = LanguageModelSettings.model_validate(values)
        except ValidationError as fault:
            raise overrides.as_setting_error(fault, LanguageModelSettings) from None
        return LanguageModel(self.shape, chosen.pipeline, chosen.optimizer, chosen.batch.sequences, chosen.batch.steps)


def find_language_model(name: str, devices: int) -> LanguageModel | None:
    """Returns ``transformer_<L>`` with one stage per device; None for any other name."""
    match = re.fullmatch(r"transformer_([1-9]\d{0,5})", name)
    if match is None:
        return None
    shape = LanguageModelShape(int(match[1]))
    stages = max(1, min(devices, shape.list_length))
    return LanguageModel(shape, PipelineSettings(stages=stages, micro_batches=BATCH, remat="auto"))
