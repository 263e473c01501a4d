"""Scale ``laptop`` of language models."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from experiments.base.cluster import Cluster
from experiments.base.shrink import fields_of
from suite.settings import DocumentSettings, OptimizerSettings

if TYPE_CHECKING:
    from experiments.language_model.experiment import LanguageModelExperiment


@dataclass(frozen=True)
class LanguageModelRule:
    """Divisors and settings of the scale. Two cores cannot train more than ``most_layers`` blocks of this width."""

    most_layers: int = 128
    width_by: int = 32
    heads_by: int = 16
    vocabulary_by: int = 32
    length_by: int = 8
    corpus: str = "docstrings"
    micro_batches: int = 4
    """Of several stages. With one, a replica computes its share of a mini-batch at once."""
    most_replicas: int = 2
    """With one stage."""
    batch_sequences: int = 16
    steps: int = 4000
    checkpoint_every: int = 500
    valid_sequences: int = 512
    residual_scale: float | None = 2.0
    learning_rate: float = 1e-2
    warmup_steps: int = 100


LAPTOP = LanguageModelRule()


def small_run(
    paper: LanguageModelExperiment, cluster: Cluster, rule: LanguageModelRule = LAPTOP
) -> LanguageModelExperiment:
    """Returns the run at scale ``laptop``."""
    stages = paper.stages_on(cluster)
    replicas = 1 if stages > 1 else max(1, min(rule.most_replicas, cluster.devices))
    micro_batches = rule.micro_batches if stages > 1 else 1
    vocabulary, length = paper.text.vocabulary // rule.vocabulary_by, paper.text.length // rule.length_by
    model = replace(
        paper.model,
        layers=min(paper.model.layers, rule.most_layers),
        width=paper.model.width // rule.width_by,
        feed_forward=paper.model.feed_forward // rule.width_by,
        heads=paper.model.heads // rule.heads_by,
        vocabulary=vocabulary,
        time=length,
        residual_scale=rule.residual_scale,
    )
    return paper.model_copy(
        update={
            "scale": "laptop",
            "model": model,
            "text": DocumentSettings(corpus=rule.corpus, vocabulary=vocabulary, length=length),
            "pipeline": paper.pipeline.model_copy(
                update={"stages": stages, "micro_batches": micro_batches, "replicas": replicas}
            ),
            "optimizer": OptimizerSettings(
                lr_decay="cosine",
                lr_decay_steps=rule.steps - rule.warmup_steps,
                **fields_of(rule, "learning_rate", "warmup_steps"),
            ),
            "train": paper.train.model_copy(
                update=fields_of(rule, "steps", "batch_sequences", "checkpoint_every", "valid_sequences")
            ),
        }
    )
