"""A run on images: one AmoebaNet-D(L, D)."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

import torch
from pydantic import BeforeValidator
from torch import nn

from experiments.base.experiment import Experiment, checked_shape
from models.amoebanet import AmoebaNetShape, layers
from models.loss import ClassificationLoss
from suite.pipeline.model.microbatch import sizes
from suite.settings import AUTO, ImageSettings, ImageTrainSettings
from suite.training.validation import Criterion


class ImageExperiment(Experiment):
    """``images.size`` is the size of the images; ``model.classes`` and ``model.channels`` must match the set."""

    unit: ClassVar[str] = "images"
    metric_name: ClassVar[str] = "accuracy"
    criterion: ClassVar[Criterion] = Criterion("accuracy", higher_is_better=True)
    fixed: ClassVar[tuple[str, ...]] = ("model", "images")
    new_last_layer: ClassVar[bool] = True

    task: Literal["classification"] = "classification"
    model: Annotated[AmoebaNetShape, BeforeValidator(checked_shape(AmoebaNetShape))]
    images: ImageSettings
    train: ImageTrainSettings

    def setting_errors(self) -> list[str]:
        """BatchNorm needs two values per channel in every micro-batch."""
        if self.pipeline.micro_batches == AUTO:
            return []
        rows = min(sizes(self.train.batch_images, self.pipeline.replicas * self.pipeline.micro_batches))
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
        """Stem, cells, classifier."""
        return self.model.list_length

    @property
    def batch(self) -> int:
        """Images."""
        return self.train.batch_images

    @property
    def data(self) -> str:
        """The image set."""
        return self.images.source

    def with_data(self, name: str) -> Self:
        """Returns a copy on another image set."""
        return self.model_copy(update={"images": self.images.model_copy(update={"source": name})})

    def build(self) -> tuple[list[nn.Module], nn.Module]:
        """Returns AmoebaNet's layers and the loss."""
        with torch.device("meta"):
            return layers(self.model), ClassificationLoss(self.model.label_smoothing)
