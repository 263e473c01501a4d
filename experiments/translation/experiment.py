"""A run on text: one multilingual Transformer T(L, H, A)."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from pydantic import BeforeValidator
from torch import nn

from experiments.base.experiment import Experiment, checked_shape
from models.blocks import start_scale
from models.loss import TranslationLoss
from models.transformer import TransformerShape, layers
from suite.settings import TextSettings, TrainSettings
from suite.training.update_rule import scaled_start_factors
from suite.training.validation import Criterion


class TranslationExperiment(Experiment):
    """``text.vocabulary`` sets the vocabulary; the model's must be equal."""

    unit: ClassVar[str] = "tokens"
    metric_name: ClassVar[str] = "nll"
    criterion: ClassVar[Criterion] = Criterion("nll")
    fixed: ClassVar[tuple[str, ...]] = ("model", "text")

    task: Literal["translation"] = "translation"
    model: Annotated[TransformerShape, BeforeValidator(checked_shape(TransformerShape))]
    text: TextSettings
    train: TrainSettings

    def setting_errors(self) -> list[str]:
        """The vocabularies must agree."""
        if self.model.vocabulary == self.text.vocabulary:
            return []
        return [
            f"model.vocabulary is {self.model.vocabulary} and text.vocabulary {self.text.vocabulary}; "
            "set only text.vocabulary, which also sets the model's"
        ]

    @property
    def list_length(self) -> int:
        """Layers of both stacks, two embeddings, and the head."""
        return self.model.list_length

    @property
    def batch(self) -> int:
        """Target tokens."""
        return self.train.batch_tokens

    @property
    def data(self) -> str:
        """The corpus."""
        return self.text.corpus

    def with_data(self, name: str) -> Self:
        """Returns a copy on another corpus."""
        return self.model_copy(update={"text": self.text.model_copy(update={"corpus": name})})

    def build(self) -> tuple[list[nn.Module], nn.Module]:
        """Returns the Transformer's layers and its loss."""
        with torch.device("meta"):
            return layers(self.model), TranslationLoss(self.model.label_smoothing)

    def completed(self, given: dict[str, Any]) -> dict[str, Any]:
        """Sets the model's vocabulary with ``text.vocabulary``."""
        if "text.vocabulary" in given:
            given.setdefault("model.vocabulary", given["text.vocabulary"])
        return super().completed(given)

    def update_factors(self, name: str, parameter: nn.Parameter) -> tuple[float, float]:
        """Output matrices of blocks move as slowly as they start small."""
        return scaled_start_factors(start_scale(self.model, name), self.optimizer)
