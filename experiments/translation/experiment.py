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
from suite.data.text.prepare import check_corpus, folder_of, prepare
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
    data_setting: ClassVar[str] = "text.corpus"

    task: Literal["translation"] = "translation"
    model: TransformerShape
    text: TextSettings
    train: TrainSettings

    def setting_errors(self) -> list[str]:
        if self.model.vocabulary == self.text.vocabulary:
            return []
        return [
            f"model.vocabulary is {self.model.vocabulary} and text.vocabulary {self.text.vocabulary}; "
            "set only text.vocabulary, which also sets the model's"
        ]

    @property
    def list_length(self) -> int:
        return self.model.list_length

    @property
    def batch(self) -> int:
        return self.train.batch_tokens

    @property
    def data(self) -> str:
        return self.text.corpus

    def build(self) -> tuple[list[nn.Module], nn.Module]:
        with torch.device("meta"):
            return layers(self.model), TranslationLoss(self.model.label_smoothing)

    def with_derived(self, given: dict[str, Any]) -> dict[str, Any]:
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
        setting = f"train.batch_tokens={max(16, int(self.batch * fraction))}"
        return self.with_settings(setting), setting

    def sample(self) -> Sample:
        return longest_rows(self) if self._prepared is None else from_text(self, self._prepared)

    def key(self) -> str:
        return repr((self.model, sample_shapes(self.sample()), update_key(self.optimizer)))

    def data_errors(self) -> list[str]:
        if self._prepared is None:
            return []
        languages = self.text.languages
        train_counts(TextData(self._prepared), self.text)
        if validation_pairs(self._prepared, languages):
            return []
        scope = f" in {', '.join(languages)}" if languages else ""
        return [
            f"{self.data} has no validation pairs{scope}; add a validation file to it (docs/own-data.md), or use a "
            "larger corpus or other languages"
        ]

    @property
    def sample_note(self) -> str:
        return f"micro-batches of rows of {self.text.max_length} tokens"

    def check_data(self) -> None:
        check_corpus(self.data)

    def data_folder(self, cache: Path) -> Path:
        return folder_of(self.text, cache)

    def prepare_data(self, cache: Path, log: Log) -> str:
        return prepare(self.text, cache, log).corpus

    def data_source(self, data: Path, coord: RankCoord) -> TextSource:
        return TextSource(self, data, coord)

    def at_laptop_scale(self, cluster: Cluster) -> Experiment:
        return self if self.scale == "laptop" else shrunk_by(self, LAPTOP, cluster)

    def at_slice_scale(self, cluster: Cluster) -> Experiment:
        return shrunk_by(self, SLICE, cluster, "slice") if self.scale == "paper" else super().at_slice_scale(cluster)
