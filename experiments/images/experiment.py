"""A run on images: one AmoebaNet-D(L, D)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Literal

import torch
from torch import nn

from experiments.base.cluster import Cluster
from experiments.base.data_source import DataSource
from experiments.base.experiment import Experiment
from models.amoebanet import AmoebaNetShape, layers
from models.loss import ClassificationLoss
from suite.log import Log
from suite.pipeline.model.layers import meta_device
from suite.pipeline.model.microbatch import even_split_sizes
from suite.pipeline.model.topology import RankCoord
from suite.pipeline.planning.sample import MicroBatch, Sample
from suite.settings import AUTO, ImageSettings, ImageTrainSettings, OptimizerSettings
from suite.training.validation import Criterion

LAPTOP_STEPS, LAPTOP_WARMUP_STEPS = 300, 30


class ImageExperiment(Experiment):
    """``images.size`` is the size of the images; ``model.classes`` and ``model.channels`` must match the set."""

    unit: ClassVar[str] = "images"
    metric_name: ClassVar[str] = "accuracy"
    criterion: ClassVar[Criterion] = Criterion("accuracy", higher_is_better=True)
    unchangeable: ClassVar[tuple[str, ...]] = ("model", "images")
    data_setting: ClassVar[str] = "images.source"
    batch_setting: ClassVar[tuple[str, int]] = ("batch_images", 1)
    new_last_layer: ClassVar[bool] = True

    task: Literal["classification"] = "classification"
    model: AmoebaNetShape
    images: ImageSettings
    train: ImageTrainSettings

    def setting_errors(self) -> list[str]:
        """BatchNorm needs two values per channel in every micro-batch."""
        if self.pipeline.micro_batches == AUTO:
            return []
        rows = min(even_split_sizes(self.train.batch_images, self.pipeline.replicas * self.pipeline.micro_batches))
        last = self.model.last_size(self.images.size)
        if rows * last * last > 1:
            return []
        return [
            "the smallest micro-batch has 1 image, which is 1 x 1 in the last layers, but BatchNorm needs two values "
            f"per channel; set pipeline.micro_batches={max(1, self.batch // 2 // self.pipeline.replicas)} "
            "or fewer, or a larger images.size"
        ]

    @property
    def list_length(self) -> int:
        return self.model.list_length

    @property
    def batch(self) -> int:
        return self.train.batch_images

    @property
    def data(self) -> str:
        return self.images.source

    def build(self) -> tuple[list[nn.Module], nn.Module]:
        with meta_device():
            return layers(self.model), ClassificationLoss(self.model.label_smoothing)

    @property
    def min_rows(self) -> int:
        """Images; half as many if BatchNorm needs two per micro-batch."""
        return self.batch // 2 if self.model.last_size(self.images.size) == 1 else self.batch

    @property
    def max_rows(self) -> int:
        return self.batch

    def sample(self) -> Sample:
        """Random images: costs do not depend on the content. Micro-batches differ by at most one image."""
        parts = even_split_sizes(self.batch, self.pipeline.replicas * self.pipeline.micro_batches)
        typical = parts[len(parts) // 2]
        return Sample(self._random(typical), self._random(parts[0]), typical)

    def _random(self, rows: int) -> MicroBatch:
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(rows, self.model.channels, self.images.size, self.images.size, generator=generator)
        return MicroBatch((images,), (torch.randint(0, self.model.classes, (rows,), generator=generator),))

    def key(self) -> str:
        return self.cost_key(self.model)

    def check_data(self) -> None:
        from suite.data.images.sets import check_source

        check_source(self.data)

    def data_folder(self, cache: Path) -> Path:
        from suite.data.images.prepare import folder_of_images

        return folder_of_images(self.images, cache)

    def prepare_data(self, cache: Path, log: Log) -> str:
        from suite.data.images.prepare import prepare_images

        return prepare_images(self.images, self.model.channels, self.model.classes, cache, log).info.source

    def data_source(self, data: Path, coord: RankCoord) -> DataSource:
        from experiments.images.source import ImageSource

        return ImageSource(data, coord, self.images, self.train, self.pipeline)

    def at_laptop_scale(self, cluster: Cluster) -> Experiment:
        """Returns an available image set, its size, fewer filters, and a few hundred steps."""
        if self.scale == "laptop":
            return self
        filters = self.model.filters // 16
        train = {"steps": LAPTOP_STEPS, "batch_images": 128, "checkpoint_every": 100}
        return self.model_copy(
            update={
                "scale": "laptop",
                "model": replace(self.model, filters=filters, classes=10, channels=1, stem="small", norm_decay=0.9),
                "images": ImageSettings(source="fashion", size=28, crop="random_shift", flip=True),
                "pipeline": self.pipeline.model_copy(update={"stages": self.stages_on(cluster), "micro_batches": 4}),
                "optimizer": OptimizerSettings(
                    learning_rate=3e-3,
                    warmup_steps=LAPTOP_WARMUP_STEPS,
                    lr_decay="cosine",
                    lr_decay_steps=LAPTOP_STEPS - LAPTOP_WARMUP_STEPS,
                    beta2=0.99,
                ),
                "train": self.train.model_copy(update=train),
            }
        )
