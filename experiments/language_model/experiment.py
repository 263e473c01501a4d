"""A run of a decoder-only language model: Transformer-L on documents."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import torch
from torch import nn

from experiments.base.cluster import Cluster
from experiments.base.experiment import Experiment
from experiments.base.workload import random_ids, sample_shapes, update_key
from experiments.language_model.source import DocumentSource
from models.blocks import start_scale
from models.language_model import LanguageModelShape, layers
from models.loss import TranslationLoss
from suite.data.documents.prepare import check_documents, folder_of_documents, prepare_documents
from suite.log import Log
from suite.pipeline.model.topology import RankCoord
from suite.pipeline.planning.profile import MicroBatch, Sample
from suite.settings import DocumentSettings, DocumentTrainSettings, OptimizerSettings
from suite.training.update_rule import scaled_start_factors
from suite.training.validation import Criterion

FOLLOWS = {"text.vocabulary": "model.vocabulary", "text.length": "model.time"}
"""Settings of the text that also set the model's."""

LAPTOP_STEPS, LAPTOP_WARMUP_STEPS = 4000, 100

LAPTOP_LAYERS = 128
"""Two cores cannot train more blocks of this width."""


class LanguageModelExperiment(Experiment):
    """``text.vocabulary`` and ``text.length`` set the model's; they must be equal."""

    unit: ClassVar[str] = "tokens"
    metric_name: ClassVar[str] = "nll"
    criterion: ClassVar[Criterion] = Criterion("nll")
    unchangeable: ClassVar[tuple[str, ...]] = ("model", "text")
    data_setting: ClassVar[str] = "text.corpus"

    task: Literal["language_model"] = "language_model"
    model: LanguageModelShape
    text: DocumentSettings
    train: DocumentTrainSettings

    def setting_errors(self) -> list[str]:
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
        return self.model.list_length

    @property
    def batch(self) -> int:
        return self.train.batch_sequences * self.text.length

    @property
    def data(self) -> str:
        return self.text.corpus

    def build(self) -> tuple[list[nn.Module], nn.Module]:
        with torch.device("meta"):
            return layers(self.model), TranslationLoss(label_smoothing=0.0)

    def with_derived(self, given: dict[str, Any]) -> dict[str, Any]:
        for text, model in FOLLOWS.items():
            if text in given:
                given.setdefault(model, given[text])
        return super().with_derived(given)

    def update_factors(self, name: str, parameter: nn.Parameter) -> tuple[float, float]:
        """Output matrices of blocks move as slowly as they start small."""
        return scaled_start_factors(start_scale(self.model, name), self.optimizer)

    @property
    def min_rows(self) -> int:
        return self.train.batch_sequences

    def with_batch_fraction(self, fraction: float) -> tuple[Self, str]:
        setting = f"train.batch_sequences={max(1, int(self.train.batch_sequences * fraction))}"
        return self.with_settings(setting), setting

    def sample(self) -> Sample:
        """Full sequences; micro-batches are equal up to one of them, and costs do not depend on the text."""
        rows = -(-self.train.batch_sequences // (self.pipeline.replicas * self.pipeline.micro_batches))
        ids = random_ids(rows, self.model.time, self.model.vocabulary)
        micro_batch = MicroBatch((ids,), (ids,))
        return Sample(micro_batch, micro_batch)

    def key(self) -> str:
        return repr((self.model, sample_shapes(self.sample()), update_key(self.optimizer)))

    def check_data(self) -> None:
        check_documents(self.data)

    def data_folder(self, cache: Path) -> Path:
        return folder_of_documents(self.text, cache)

    def prepare_data(self, cache: Path, log: Log) -> str:
        return prepare_documents(self.text, cache, log).corpus

    def data_source(self, data: Path, coord: RankCoord) -> DocumentSource:
        return DocumentSource(self, data, coord)

    def at_laptop_scale(self, cluster: Cluster) -> Experiment:
        """With one stage, up to two replicas each compute their share of a mini-batch at once."""
        if self.scale == "laptop":
            return self
        stages = self.stages_on(cluster)
        replicas, micro_batches = (1, 4) if stages > 1 else (max(1, min(2, cluster.devices)), 1)
        vocabulary, length = self.text.vocabulary // 32, self.text.length // 8
        model = replace(
            self.model,
            layers=min(self.model.layers, LAPTOP_LAYERS),
            width=self.model.width // 32,
            feed_forward=self.model.feed_forward // 32,
            heads=self.model.heads // 16,
            vocabulary=vocabulary,
            time=length,
            residual_scale=2.0,
        )
        return self.model_copy(
            update={
                "scale": "laptop",
                "model": model,
                "text": DocumentSettings(corpus="docstrings", vocabulary=vocabulary, length=length),
                "pipeline": self.pipeline.model_copy(
                    update={"stages": stages, "micro_batches": micro_batches, "replicas": replicas}
                ),
                "optimizer": OptimizerSettings(
                    learning_rate=1e-2,
                    warmup_steps=LAPTOP_WARMUP_STEPS,
                    lr_decay="cosine",
                    lr_decay_steps=LAPTOP_STEPS - LAPTOP_WARMUP_STEPS,
                ),
                "train": self.train.model_copy(
                    update={
                        "steps": LAPTOP_STEPS,
                        "batch_sequences": 16,
                        "checkpoint_every": 500,
                        "valid_sequences": 512,
                    }
                ),
            }
        )
