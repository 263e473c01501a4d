"""Scale ``laptop`` of language models."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from experiments.base.cluster import Cluster
from suite.settings import DocumentSettings, OptimizerSettings

if TYPE_CHECKING:
    from experiments.language_model.experiment import LanguageModelExperiment

MOST_LAYERS = 128
"""Two cores cannot train more blocks of this width."""

STEPS, WARMUP_STEPS = 4000, 100


def small_run(paper: LanguageModelExperiment, cluster: Cluster) -> LanguageModelExperiment:
    """Returns the run at scale ``laptop``. With one stage, up to two replicas each compute their share of a mini-batch
    at once."""
    stages = paper.stages_on(cluster)
    replicas, micro_batches = (1, 4) if stages > 1 else (max(1, min(2, cluster.devices)), 1)
    vocabulary, length = paper.text.vocabulary // 32, paper.text.length // 8
    model = replace(
        paper.model,
        layers=min(paper.model.layers, MOST_LAYERS),
        width=paper.model.width // 32,
        feed_forward=paper.model.feed_forward // 32,
        heads=paper.model.heads // 16,
        vocabulary=vocabulary,
        time=length,
        residual_scale=2.0,
    )
    return paper.model_copy(
        update={
            "scale": "laptop",
            "model": model,
            "text": DocumentSettings(corpus="docstrings", vocabulary=vocabulary, length=length),
            "pipeline": paper.pipeline.model_copy(
                update={"stages": stages, "micro_batches": micro_batches, "replicas": replicas}
            ),
            "optimizer": OptimizerSettings(
                learning_rate=1e-2,
                warmup_steps=WARMUP_STEPS,
                lr_decay="cosine",
                lr_decay_steps=STEPS - WARMUP_STEPS,
            ),
            "train": paper.train.model_copy(
                update={"steps": STEPS, "batch_sequences": 16, "checkpoint_every": 500, "valid_sequences": 512}
            ),
        }
    )
