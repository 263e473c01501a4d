"""A run of a decoder-only language model: Transformer-L on documents."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Literal

from torch import nn

from experiments.base.cluster import Cluster
from experiments.base.data_source import DataSource
from experiments.base.experiment import Experiment
from experiments.base.text_experiment import TextExperiment
from models.language_model import layers
from models.loss import TranslationLoss
from models.shape import LanguageModelShape
from suite.log import Log
from suite.pipeline.model.layers import meta_device
from suite.pipeline.model.topology import RankCoord
from suite.pipeline.planning.sample import MicroBatch, Sample
from suite.settings import DocumentSettings, DocumentTrainSettings, OptimizerSettings

LAPTOP_STEPS, LAPTOP_WARMUP_STEPS = 4000, 100

LAPTOP_BLOCKS = 128
"""Two cores cannot train more blocks of this width."""


class LanguageModelExperiment(TextExperiment):
    batch_setting: ClassVar[tuple[str, int]] = ("batch_sequences", 1)
    followed_by: ClassVar[dict[str, str]] = {"vocabulary": "vocabulary", "length": "context_length"}

    task: Literal["language_model"] = "language_model"
    model: LanguageModelShape
    text: DocumentSettings
    train: DocumentTrainSettings

    @property
    def batch(self) -> int:
        return self.train.batch_sequences * self.text.length

    def build(self) -> tuple[list[nn.Module], nn.Module]:
        with meta_device():
            return layers(self.model), TranslationLoss(label_smoothing=0.0)

    @property
    def min_rows(self) -> int:
        return self.train.batch_sequences

    def sample(self) -> Sample:
        """Full sequences; micro-batches are equal up to one of them."""
        ids = self.full_rows(self.text.length)
        micro_batch = MicroBatch((ids,), (ids,))
        return Sample(micro_batch, micro_batch)

    def check_data(self) -> None:
        from suite.data.documents.prepare import check_documents

        check_documents(self.data)

    def data_folder(self, cache: Path) -> Path:
        from suite.data.documents.prepare import folder_of_documents

        return folder_of_documents(self.text, cache)

    def prepare_data(self, cache: Path, log: Log) -> str:
        from suite.data.documents.prepare import prepare_documents

        return prepare_documents(self.text, cache, log).corpus

    def data_source(self, data: Path, coord: RankCoord) -> DataSource:
        from experiments.language_model.source import DocumentSource

        return DocumentSource(data, coord, self.text, self.train, self.pipeline)

    def at_laptop_scale(self, cluster: Cluster) -> Experiment:
        """With one stage, up to two replicas each compute their share of a mini-batch at once."""
        if self.scale == "laptop":
            return self
        stages = self.stages_on(cluster)
        replicas, micro_batches = (1, 4) if stages > 1 else (max(1, min(2, cluster.devices)), 1)
        vocabulary, length = self.text.vocabulary // 32, self.text.length // 8
        model = replace(
            self.model,
            blocks_per_stack=min(self.model.blocks_per_stack, LAPTOP_BLOCKS),
            width=self.model.width // 32,
            feed_forward=self.model.feed_forward // 32,
            heads=self.model.heads // 16,
            vocabulary=vocabulary,
            context_length=length,
            residual_scale=2.0,
        )
        pipeline = {"stages": stages, "micro_batches": micro_batches, "replicas": replicas}
        train = {"steps": LAPTOP_STEPS, "batch_sequences": 16, "checkpoint_every": 500, "valid_sequences": 512}
        return self.model_copy(
            update={
                "scale": "laptop",
                "model": model,
                "text": DocumentSettings(corpus="docstrings", vocabulary=vocabulary, length=length),
                "pipeline": self.pipeline.model_copy(update=pipeline),
                "optimizer": OptimizerSettings(
                    learning_rate=1e-2,
                    warmup_steps=LAPTOP_WARMUP_STEPS,
                    lr_decay="cosine",
                    lr_decay_steps=LAPTOP_STEPS - LAPTOP_WARMUP_STEPS,
                ),
                "train": self.train.model_copy(update=train),
            }
        )
