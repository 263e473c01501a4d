"""A run on text: one multilingual Transformer T(L, H, A)."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

from torch import nn

from experiments.base.cluster import Cluster
from experiments.base.data_source import DataSource
from experiments.base.experiment import Experiment
from experiments.base.text_experiment import TextExperiment
from experiments.translation.scales import LAPTOP, SLICE, shrunk_by
from models.loss import TranslationLoss
from models.shape import TransformerShape
from models.transformer import layers
from suite.log import Log
from suite.pipeline.model.layers import meta_device
from suite.pipeline.model.topology import RankCoord
from suite.pipeline.planning.sample import MicroBatch, Sample
from suite.settings import TextSettings, TrainSettings


class TranslationExperiment(TextExperiment):
    batch_setting: ClassVar[tuple[str, int]] = ("batch_tokens", 16)
    followed_by: ClassVar[dict[str, str]] = {"vocabulary": "vocabulary"}

    task: Literal["translation"] = "translation"
    model: TransformerShape
    text: TextSettings
    train: TrainSettings

    @property
    def batch(self) -> int:
        return self.train.batch_tokens

    def build(self) -> tuple[list[nn.Module], nn.Module]:
        with meta_device():
            return layers(self.model), TranslationLoss(self.model.label_smoothing)

    @property
    def min_rows(self) -> int:
        """Sentences of full length; there are more if they are shorter."""
        return max(1, self.train.batch_tokens // self.text.max_length)

    @property
    def max_rows(self) -> int:
        """One target token per row is the least; a step with fewer rows has fewer micro-batches."""
        return self.train.batch_tokens

    def sample(self) -> Sample:
        """Real text if that is prepared, otherwise sentences of full length, which need the most bytes per token."""
        if self._prepared is not None:
            from experiments.translation.sample import from_text

            return from_text(self, self._prepared)
        ids = self.full_rows(self.text.max_length)
        micro_batch = MicroBatch((ids, ids), (ids,))
        return Sample(micro_batch, micro_batch)

    def data_errors(self) -> list[str]:
        if self._prepared is None:
            return []
        from experiments.translation.sample import validation_pairs
        from suite.data.text.subset import train_counts
        from suite.data.text.text import TextData

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
        from suite.data.text.prepare import check_corpus

        check_corpus(self.data)

    def data_folder(self, cache: Path) -> Path:
        from suite.data.text.prepare import folder_of

        return folder_of(self.text, cache)

    def prepare_data(self, cache: Path, log: Log) -> str:
        from suite.data.text.prepare import prepare

        return prepare(self.text, cache, log).corpus

    def data_source(self, data: Path, coord: RankCoord) -> DataSource:
        from experiments.translation.source import TextSource

        return TextSource(data, coord, self.text, self.train, self.pipeline)

    def at_laptop_scale(self, cluster: Cluster) -> Experiment:
        return self if self.scale == "laptop" else shrunk_by(self, LAPTOP, cluster)

    def at_slice_scale(self, cluster: Cluster) -> Experiment:
        return shrunk_by(self, SLICE, cluster, "slice") if self.scale == "paper" else super().at_slice_scale(cluster)
