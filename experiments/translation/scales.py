"""The scales of translation runs: how much smaller than the paper's each setting is, by declared rules for all runs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from experiments.base.cluster import Cluster
from suite.settings import OptimizerSettings, Remat, ScheduleName

if TYPE_CHECKING:
    from experiments.translation.experiment import TranslationExperiment


@dataclass(frozen=True)
class TextRule:
    """Scale ``laptop``'s divisors for the sizes of a run on text, and its settings. Only sweeps divide the depth."""

    blocks_by: float = 1
    most_blocks: int | None = None
    """Largest number of encoder layers, and of decoder layers."""
    most_stages: int | None = None
    """Largest K; 1 lets a sweep on two cores train two models at a time."""
    width_by: int = 16
    feed_forward_by: int = 64
    heads_by: int = 16
    head_width_by: int = 2
    vocabulary_by: int = 32
    corpus: str = "catalogues"
    max_length: int = 48
    corpus_languages: tuple[str, ...] | None = None
    train_pairs: tuple[str, ...] | None = None
    micro_batches: int | None = None
    """None: two for each stage. These models are so narrow that fewer and larger micro-batches are faster."""
    schedule: ScheduleName = "auto"
    remat: Remat = "auto"
    batch_tokens: int = 1024
    steps: int = 420
    checkpoint_every: int = 105
    valid_pairs: int = 512
    # Less than one pass over the text cannot overfit, so nothing is dropped.
    dropout: float = 0.0
    # With the paper's start and AdamW 128 layers learn little in a run as short as these (docs/depth.md).
    residual_scale: float | None = 1.0
    # Adafactor's 40,000 steps of warm-up are longer than the whole run.
    optimizer: Literal["adamw", "adafactor"] = "adamw"
    learning_rate: float = 1e-2
    warmup_steps: int = 30
    lr_decay: Literal["inverse_sqrt", "cosine", "linear"] = "linear"
    max_grad_norm: float | None = 1.0
    precision: Literal["fp32", "bf16"] = "fp32"
    threads: int | None = None


LAPTOP = TextRule()

SLICE = TextRule(
    most_blocks=4, most_stages=2, width_by=1, feed_forward_by=1, heads_by=1, head_width_by=1, vocabulary_by=1,
    max_length=128, micro_batches=4, schedule="fill_drain", remat="except_last", batch_tokens=512, steps=30,
    checkpoint_every=15, valid_pairs=32, dropout=0.1, residual_scale=None, optimizer="adafactor", learning_rate=3e-3,
    warmup_steps=10, lr_decay="inverse_sqrt", max_grad_norm=None, precision="bf16",
)  # fmt: skip
"""The rule of scale ``slice``: the paper's widths, vocabulary, update, precision and recomputation, with few layers and
steps. Up to 500M parameters, which two cores and 16 GiB hold. It tests what paper scale computes, not what it learns.
"""

TINY_TEXT = TextRule(
    blocks_by=12, width_by=64, feed_forward_by=512, head_width_by=8, vocabulary_by=50, corpus="django",
    corpus_languages=("de", "es", "nl"), train_pairs=("nl:200",), max_length=16, micro_batches=2, batch_tokens=128,
    steps=4, checkpoint_every=2, valid_pairs=16, warmup_steps=2, threads=1,
)  # fmt: skip
"""The rule of scale ``tiny``: it tests a sweep, and the models learn nothing."""


def shrunk_by(
    paper: TranslationExperiment, rule: TextRule, cluster: Cluster, scale: str = "laptop"
) -> TranslationExperiment:
    """Returns a run shrunk by a rule, with every change listed in ``shrunk``. A sweep's scale such as ``laptop_long``
    gives runs of scale ``laptop``."""
    stages = min(paper.stages_on(cluster), rule.most_stages or paper.pipeline.stages)
    blocks, vocabulary = paper.model.blocks_per_stack, paper.text.vocabulary // rule.vocabulary_by
    small = paper.model_copy(
        update={
            "scale": scale.partition("_")[0],
            "model": replace(
                paper.model,
                blocks_per_stack=min(max(1, round(blocks / rule.blocks_by)), rule.most_blocks or blocks),
                width=paper.model.width // rule.width_by,
                feed_forward=paper.model.feed_forward // rule.feed_forward_by,
                heads=max(1, paper.model.heads // rule.heads_by),
                head_width=paper.model.head_width // rule.head_width_by,
                vocabulary=vocabulary,
                **fields_of(rule, "dropout", "residual_scale"),
            ),
            "text": paper.text.model_copy(
                update={
                    "vocabulary": vocabulary,
                    **fields_of(rule, "corpus", "max_length", "corpus_languages", "train_pairs"),
                }
            ),
            "pipeline": paper.pipeline.model_copy(
                update={
                    "stages": stages,
                    "micro_batches": rule.micro_batches or 2 * stages,
                    "replicas": 1,
                    **fields_of(rule, "schedule", "remat"),
                }
            ),
            "optimizer": OptimizerSettings(
                name=rule.optimizer,
                lr_decay_steps=(
                    paper.optimizer.lr_decay_steps
                    if rule.lr_decay == "inverse_sqrt"
                    else rule.steps - rule.warmup_steps
                ),
                **fields_of(rule, "learning_rate", "warmup_steps", "lr_decay", "max_grad_norm", "precision"),
            ),
            "train": paper.train.model_copy(
                update=fields_of(rule, "steps", "batch_tokens", "checkpoint_every", "valid_pairs", "threads")
            ),
        }
    )
    return small.with_changes_from(paper)


def fields_of(rule: object, *names: str) -> dict[str, Any]:
    """Returns fields of a scale's rule whose settings have the same names."""
    return {name: getattr(rule, name) for name in names}
