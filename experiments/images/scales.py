"""Scale ``laptop`` of runs on images."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from experiments.base.cluster import Cluster
from experiments.base.shrink import fields_of
from suite.settings import ImageSettings, OptimizerSettings

if TYPE_CHECKING:
    from experiments.images.experiment import ImageExperiment


@dataclass(frozen=True)
class ImageRule:
    """Divisors and settings of the scale: an available image set, its size, and a few hundred steps."""

    filters_by: int = 16
    source: str = "fashion"
    size: int = 28
    channels: int = 1
    classes: int = 10
    stem: str = "small"
    micro_batches: int = 4
    batch_images: int = 128
    steps: int = 300
    checkpoint_every: int = 100
    norm_decay: float = 0.9
    learning_rate: float = 3e-3
    warmup_steps: int = 30


LAPTOP = ImageRule()


def small_run(paper: ImageExperiment, cluster: Cluster, rule: ImageRule = LAPTOP) -> ImageExperiment:
    """Returns the run at scale ``laptop``."""
    model = replace(
        paper.model,
        filters=paper.model.filters // rule.filters_by,
        **fields_of(rule, "classes", "channels", "stem", "norm_decay"),
    )
    return paper.model_copy(
        update={
            "scale": "laptop",
            "model": model,
            "images": ImageSettings(source=rule.source, size=rule.size, crop="random_shift", flip=True),
            "pipeline": paper.pipeline.model_copy(
                update={"stages": paper.stages_on(cluster), "micro_batches": rule.micro_batches}
            ),
            "optimizer": OptimizerSettings(
                learning_rate=rule.learning_rate,
                warmup_steps=rule.warmup_steps,
                lr_decay="cosine",
                lr_decay_steps=rule.steps - rule.warmup_steps,
                beta2=0.99,
            ),
            "train": paper.train.model_copy(update=fields_of(rule, "steps", "batch_images", "checkpoint_every")),
        }
    )
