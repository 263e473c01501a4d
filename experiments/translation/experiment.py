"""A run on text: one multilingual Transformer T(L, H, A)."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import torch
from torch import nn

from experiments.base.cluster import Cluster
from experiments.base.experiment import Experiment
from experiments.base.workload import sample_shapes, update_key
from experiments.translation.sample import from_text, longest_rows, validation_pairs
from experiments.translation.scales import LAPTOP, SLICE, shrunk_by
from experiments.translation.source import TextSource
from models.blocks import start_scale
from models.loss import TranslationLoss
from models.transformer import TransformerShape, layers
from suite.data.text.corpora import check_corpus
from suite.data.text.prepare import folder_of, prepare
from suite.data.text.subset import train_counts
from suite.data.text.text import TextData
from suite.log import Log
from suite.pipeline.model.topology import RankCoord
from suite.pipeline.planning.profile import Sample
from suite.settings import TextSettings, TrainSettings
from suite.training.update_rule import scaled_start_factors
from suite.training.validation import Criterion


class TranslationExperiment(Experiment):
    """``text.vocabulary`` sets the vocabulary; the model's must be equal."""

    unit: ClassVar[str] = "tokens"
    metric_name: ClassVar[str] = "nll"
    criterion: ClassVar[Criterion] = Criterion("nll")
    unchangeable: ClassVar[tuple[str, ...]] = ("model", "text")

    task: Literal["translation"] = "translation"
    model: TransformerShape
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

    def with_derived(self, given: dict[str, Any]) -> dict[str, Any]:
        """Sets the model's vocabulary with ``text.vocabulary``."""
        if "text.vocabulary" in given:
            given.setdefault("model.vocabulary", given["text.vocabulary"])
        return super().with_derived(given)

    def update_factors(self, name: str, parameter: nn.Parameter) -> tuple[float, float]:
        """Output matrices of blocks move as slowly as they start small."""
        return scaled_start_factors(start_scale(self.model, name), self.optimizer)

    @property
    def min_rows(self) -> int:
        """Sentences of full length; there are more if they are shorter."""
        return max(1, self.train.batch_tokens // self.text.max_length)

    @property
    def max_rows(self) -> int:
        """One target token per row is the least; a step with fewer rows has fewer micro-batches."""
        return self.train.batch_tokens

    def with_batch_fraction(self, fraction: float) -> tuple[Self, str]:
        """With fewer tokens."""
        setting = f"train.batch_tokens={max(16, int(self.batch * fraction))}"
        return self.with_settings(setting), setting

    def sample(self) -> Sample:
        """From the prepared text, if there is one."""
        return longest_rows(self) if self._prepared is None else from_text(self, self._prepared)

    def key(self) -> str:
        """The model, the shapes of the sample, and the update."""
        return repr((self.model, sample_shapes(self.sample()), update_key(self.optimizer)))

    def data_errors(self) -> list[str]:
        """Whether the prepared text has something to validate on."""
        if self._prepared is None:
            return []
        languages = self.text.languages
        train_counts(TextData.open(self._prepared), self.text)
        if validation_pairs(self._prepared, languages):
            return []
        scope = f" in {', '.join(languages)}" if languages else ""
        return [
            f"{self.data} has no validation pairs{scope}; add a validation file to it (docs/own-data.md), or use a "
            "larger corpus or other languages"
        ]

    @property
    def sample_note(self) -> str:
        """Rows of full length."""
        return f"micro-batches of rows of {self.text.max_length} tokens"

    def check_data(self) -> None:
        """Of the corpus."""
        check_corpus(self.data)

    def data_folder(self, cache: Path) -> Path:
        """By corpus, languages, vocabulary and length."""
        return folder_of(self.text, cache)

    def prepare_data(self, cache: Path, log: Log) -> str:
        """Cleans, splits and tokenizes the text."""
        return prepare(self.text, cache, log).corpus

    def data_source(self, data: Path, coord: RankCoord) -> TextSource:
        """Sentence pairs."""
        return TextSource(self, data, coord)

    def at_laptop_scale(self, cluster: Cluster) -> Experiment:
        """Narrow, as deep as the paper's."""
        return self if self.scale == "laptop" else shrunk_by(self, LAPTOP, cluster)

    def at_slice_scale(self, cluster: Cluster) -> Experiment:
        """The paper's widths, few layers over at most 2 stages."""
        return shrunk_by(self, SLICE, cluster, "slice") if self.scale == "paper" else super().at_slice_scale(cluster)
