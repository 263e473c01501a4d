"""The common part of runs of a Transformer on text: translation and language models."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from experiments.base.experiment import Experiment
from experiments.base.workload import random_ids
from models.blocks import start_scale
from models.shape import BlockShape
from suite.settings import DocumentSettings, TextSettings
from suite.training.update_rule import scaled_start_factors
from suite.training.validation import Criterion


class TextExperiment(Experiment):
    """Settings of the text set those of the model that follow from them; they must be equal."""

    unit: ClassVar[str] = "tokens"
    metric_name: ClassVar[str] = "nll"
    criterion: ClassVar[Criterion] = Criterion("nll")
    unchangeable: ClassVar[tuple[str, ...]] = ("model", "text")
    data_setting: ClassVar[str] = "text.corpus"
    followed_by: ClassVar[dict[str, str]]
    """For each of these settings of the text the one of the model that it sets."""

    model: BlockShape
    text: TextSettings | DocumentSettings

    def setting_errors(self) -> list[str]:
        errors = []
        for text, model in self.followed_by.items():
            wanted, found = getattr(self.text, text), getattr(self.model, model)
            if wanted != found:
                errors.append(
                    f"model.{model} is {found} and text.{text} {wanted}; set only text.{text}, which also sets the "
                    "model's"
                )
        return errors

    @property
    def list_length(self) -> int:
        return self.model.list_length

    @property
    def data(self) -> str:
        return self.text.corpus

    def with_derived(self, given: dict[str, Any]) -> dict[str, Any]:
        for text, model in self.followed_by.items():
            if f"text.{text}" in given:
                given.setdefault(f"model.{model}", given[f"text.{text}"])
        return super().with_derived(given)

    def update_factors(self, name: str, parameter: nn.Parameter) -> tuple[float, float]:
        """Output matrices of blocks move as slowly as they start small."""
        return scaled_start_factors(start_scale(self.model, name), self.optimizer)

    def full_rows(self, length: int) -> Tensor:
        """Returns ids (rows, length), int64, with a micro-batch's tokens: costs do not depend on the text."""
        rows = -(-self.batch // (self.pipeline.replicas * self.pipeline.micro_batches * length))
        return random_ids(rows, length, self.text.vocabulary)

    def key(self) -> str:
        return self.cost_key(self.model)
