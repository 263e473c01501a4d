"""Scale ``laptop`` of runs on images."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from experiments.base.cluster import Cluster
from suite.settings import ImageSettings, OptimizerSettings

if TYPE_CHECKING:
    from experiments.images.experiment import ImageExperiment

STEPS, WARMUP_STEPS = 300, 30


def small_run(paper: ImageExperiment, cluster: Cluster) -> ImageExperiment:
    """Returns the run at scale ``laptop``: an available image set, its size, and a few hundred steps."""
    filters = paper.model.filters // 16
    return paper.model_copy(
        update={
            "scale": "laptop",
            "model": replace(paper.model, filters=filters, classes=10, channels=1, stem="small", norm_decay=0.9),
            "images": ImageSettings(source="fashion", size=28, crop="random_shift", flip=True),
            "pipeline": paper.pipeline.model_copy(update={"stages": paper.stages_on(cluster), "micro_batches": 4}),
            "optimizer": OptimizerSettings(
                learning_rate=3e-3,
                warmup_steps=WARMUP_STEPS,
                lr_decay="cosine",
                lr_decay_steps=STEPS - WARMUP_STEPS,
                beta2=0.99,
            ),
            "train": paper.train.model_copy(update={"steps": STEPS, "batch_images": 128, "checkpoint_every": 100}),
        }
    )
