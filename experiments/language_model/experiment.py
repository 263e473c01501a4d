"""A run of a decoder-only language model: Transformer-L on documents."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from pydantic import BeforeValidator
from torch import nn

from experiments.base.experiment import Experiment, checked_shape
from models.blocks import start_scale
from models.language_model import LanguageModelShape, layers
from models.loss import TranslationLoss
from suite.settings import DocumentSettings, DocumentTrainSettings
from suite.training.update_rule import scaled_start_factors
from suite.training.validation import Criterion

FOLLOWS = {"text.vocabulary": "model.vocabulary", "text.length": "model.time"}
"""Settings of the text that also set the model's."""


class LanguageModelExperiment(Experiment):
    """``text.vocabulary`` and ``text.length`` set the model's; they must be equal."""

    unit: ClassVar[str] = "tokens"
    metric_name: ClassVar[str] = "nll"
    criterion: ClassVar[Criterion] = Criterion("nll")
    fixed: ClassVar[tuple[str, ...]] = ("model", "text")

    task: Literal["language_model"] = "language_model"
    model: Annotated[LanguageModelShape, BeforeValidator(checked_shape(LanguageModelShape))]
    text: DocumentSettings
    train: DocumentTrainSettings

    def setting_errors(self) -> list[str]:
        """The vocabularies and the lengths must agree."""
        pairs = (
            ("text.vocabulary", self.text.vocabulary, "model.vocabulary", self.model.vocabulary),
            ("text.length", self.text.length, "model.time", self.model.time),
        )
        return [
            f"{other} is {found} and {name} {wanted}; set only {name}, which also sets the model's"
            for name, wanted, other, found in pairs
            if wanted != found
        ]

    @property
    def list_length(self) -> int:
        """The blocks, the embedding and the head."""
        return self.model.list_length

    @property
    def batch(self) -> int:
        """Tokens."""
        return self.train.batch_sequences * self.text.length

    @property
    def data(self) -> str:
        """The corpus."""
        return self.text.corpus

    def with_data(self, name: str) -> Self:
        """Returns a copy on another corpus."""
        return self.model_copy(update={"text": self.text.model_copy(update={"corpus": name})})

    def build(self) -> tuple[list[nn.Module], nn.Module]:
        """Returns the blocks between embedding and head, and the plain loss."""
        with torch.device("meta"):
            return layers(self.model), TranslationLoss(label_smoothing=0.0)

    def completed(self, given: dict[str, Any]) -> dict[str, Any]:
        """Sets the model's vocabulary and length with the text's."""
        for text, model in FOLLOWS.items():
            if text in given:
                given.setdefault(model, given[text])
        return super().completed(given)

    def update_factors(self, name: str, parameter: nn.Parameter) -> tuple[float, float]:
        """Output matrices of blocks move as slowly as they start small."""
        return scaled_start_factors(start_scale(self.model, name), self.optimizer)
