"""From the paper's numbers to the devices at hand, by one declared rule for all runs, and never silently.

Single runs keep their depth. Sweeps (``experiments/sweep.py``) have rules of their own, ``SWEEPS``: many runs share an
hour, so they divide the depth as well, all runs alike.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from experiments.cluster import Cluster
from experiments.experiment import Experiment
from experiments.image_experiment import ImageExperiment
from experiments.text_experiment import TranslationExperiment
from suite.settings import ImageSettings, OptimizerSettings


@dataclass(frozen=True)
class TextRule:
    """What ``laptop`` divides the sizes of a run on text by, and what it sets. Only sweeps touch the depth."""

    layers_by: float = 1
    width_by: int = 16
    feed_forward_by: int = 64
    heads_by: int = 16
    head_width_by: int = 2
    vocabulary_by: int = 32
    corpus: str = "catalogues"
    max_tokens: int = 48
    languages: tuple[str, ...] | None = None
    micro_batches: int = 8
    batch_tokens: int = 1024
    steps: int = 140
    checkpoint_every: int = 50
    valid_pairs: int = 512
    # Less than one pass over the text cannot overfit, so nothing is dropped.
    dropout: float = 0.0
    # Adafactor's 40,000 steps of warm-up are longer than the whole run.
    optimizer: Literal["adamw", "adafactor"] = "adamw"
    learning_rate: float = 1e-2
    warmup_steps: int = 30
    decay: Literal["inverse_sqrt", "cosine"] = "inverse_sqrt"
    clip_norm: float | None = 1.0
    precision: Literal["fp32", "bf16"] = "fp32"
    threads: int | None = None


@dataclass(frozen=True)
class SweepRule:
    """How a scale shrinks the runs of a sweep on text, and what it makes of the sweep.

    Equal for all that are compared: the tokens (``batch_tokens`` x ``steps``), the text, the update and the seeds. Deep
    and wide have equal parameters: all depths are divided by one number, all widths by one number, and of T(24, H, A)
    and T(12, 2H, 2A) that leaves T(24/n, h, a) and T(12/n, 2h, 2a).

    A bilingual baseline has the shape of T(6, 8192, 16), the smallest of the five (the paper's baselines have 350M
    parameters, its smallest model 400M), and one language in both directions. It trains as many steps of as many tokens
    as a multilingual run, so on several times as much of its own language: the paper's are trained until they are good,
    and one that saw only its share of the tokens would be beaten by being stopped early.
    """

    text: TextRule | None
    """None: the paper's numbers."""
    baselines: tuple[str, ...]
    """Languages that get a bilingual baseline."""
    seeds: int
    beam: int = 4
    max_pairs: int | None = None
    """Test pairs of each direction that are decoded; None for all."""
    batches: tuple[float, float, float] = (0.26, 1.0, 4.0)
    """Mini-batches of the batch-size sweep in ``batch_tokens``: the paper's 260K, 1M and 4M."""


@dataclass(frozen=True)
class ImageRule:
    """The same for a run on images: the set at hand, its size, and what a few hundred steps can do."""

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


TEXT, IMAGES = TextRule(), ImageRule()

SWEEPS = {
    # Two languages of each third of the default corpus, all with 50 test pairs or more, in Latin script: German and
    # Spanish, Galician and Esperanto, Afrikaans and Friulian. The poor ones have relatives among the rich.
    "laptop": SweepRule(
        TextRule(
            layers_by=6, vocabulary_by=16, languages=("af", "de", "eo", "es", "fur", "gl"), max_tokens=20,
            micro_batches=4, batch_tokens=1024, steps=700, checkpoint_every=350, valid_pairs=512, dropout=0.1,
            learning_rate=4e-3, warmup_steps=60, decay="cosine", threads=1,
        ),
        baselines=("af", "de", "eo", "es", "fur", "gl"),
        seeds=2,
        max_pairs=100,
    ),
    # Whether all of it works, in two minutes: nothing is learned.
    "tiny": SweepRule(
        TextRule(
            layers_by=12, width_by=64, feed_forward_by=512, head_width_by=8, vocabulary_by=50, corpus="django",
            languages=("de", "es", "nl"), max_tokens=16, micro_batches=2, batch_tokens=128, steps=4, checkpoint_every=2,
            valid_pairs=16, warmup_steps=2, threads=1,
        ),
        baselines=("de", "es"),
        seeds=1,
        beam=1,
        max_pairs=3,
    ),
    # One GPU, all depths and all languages; about half an hour is what it was made for. It has not run.
    "gpu": SweepRule(
        TextRule(
            width_by=4, feed_forward_by=16, heads_by=8, head_width_by=1, vocabulary_by=4, max_tokens=48,
            micro_batches=1, batch_tokens=16_384, steps=1500, checkpoint_every=750, valid_pairs=2048, dropout=0.1,
            learning_rate=2e-3, warmup_steps=150, decay="cosine", precision="bf16",
        ),
        baselines=("af", "de", "eo", "es", "fur", "gl"),
        seeds=2,
        max_pairs=100,
    ),
    # Its runs have the largest of the three batches.
    "paper": SweepRule(
        None, baselines=("de", "fr", "cy", "ka", "gd", "yo"), seeds=1, batches=(0.065, 0.25, 1.0)
    ),
}  # fmt: skip
"""Scales of sweeps on text, by name."""


def laptop(paper: Experiment, cluster: Cluster) -> Experiment:
    """Returns the experiment small enough for a few CPU cores, every change listed in ``shrunk``.

    K becomes the number of devices if that is less; but on cores, which can take turns, a run that the paper pipelines
    stays a pipeline of at least 2. A run that is made for a laptop stays as it is.
    """
    if paper.scale == "laptop":
        return paper
    if isinstance(paper, TranslationExperiment):
        return with_changes(paper, _small_text(paper, _stages(paper, cluster), TEXT))
    assert isinstance(paper, ImageExperiment), type(paper)
    return with_changes(paper, _small_images(paper, _stages(paper, cluster), IMAGES))


def swept(paper: TranslationExperiment, scale: str, cluster: Cluster) -> TranslationExperiment:
    """Returns a run as the sweeps of a scale have it, every change listed in ``shrunk``."""
    rule = SWEEPS[scale].text
    return paper if rule is None else shrunk_by(paper, rule, cluster, scale)


def shrunk_by(
    paper: TranslationExperiment, rule: TextRule, cluster: Cluster, scale: str = "laptop"
) -> TranslationExperiment:
    """Returns a run made smaller by a rule, every change listed in ``shrunk``."""
    small = _small_text(paper, _stages(paper, cluster), rule).model_copy(update={"scale": scale})
    changed = with_changes(paper, small)
    assert isinstance(changed, TranslationExperiment)
    return changed


def _stages(paper: Experiment, cluster: Cluster) -> int:
    least = min(paper.pipeline.stages, 2) if cluster.kind == "cpu" else 1
    return max(min(paper.pipeline.stages, cluster.devices), least)


def onto(experiment: Experiment, cluster: Cluster) -> Experiment:
    """Returns a run that is made for a laptop over no more stages than there are GPUs; on cores it stays as it is."""
    most = max(1, cluster.devices)
    if cluster.kind == "cpu" or experiment.pipeline.stages <= most:
        return experiment
    pipeline = experiment.pipeline.model_copy(update={"stages": most, "cells": None})
    return with_changes(experiment, experiment.model_copy(update={"pipeline": pipeline}))


def _small_text(paper: TranslationExperiment, stages: int, rule: TextRule) -> Experiment:
    vocabulary = paper.text.vocabulary // rule.vocabulary_by
    return paper.model_copy(
        update={
            "scale": "laptop",
            "model": replace(
                paper.model,
                layers=max(1, round(paper.model.layers / rule.layers_by)),
                width=paper.model.width // rule.width_by,
                feed_forward=paper.model.feed_forward // rule.feed_forward_by,
                heads=paper.model.heads // rule.heads_by,
                head_width=paper.model.head_width // rule.head_width_by,
                vocabulary=vocabulary,
                dropout=rule.dropout,
            ),
            "text": paper.text.model_copy(
                update={
                    "corpus": rule.corpus,
                    "vocabulary": vocabulary,
                    "max_tokens": rule.max_tokens,
                    "languages": rule.languages,
                }
            ),
            "pipeline": paper.pipeline.model_copy(
                update={"stages": stages, "micro_batches": rule.micro_batches, "replicas": 1}
            ),
            "optimizer": OptimizerSettings(
                name=rule.optimizer,
                learning_rate=rule.learning_rate,
                warmup_steps=rule.warmup_steps,
                decay=rule.decay,
                decay_steps=rule.steps - rule.warmup_steps if rule.decay == "cosine" else paper.optimizer.decay_steps,
                clip_norm=rule.clip_norm,
                precision=rule.precision,
            ),
            "train": paper.train.model_copy(
                update={
                    "steps": rule.steps,
                    "batch_tokens": rule.batch_tokens,
                    "checkpoint_every": rule.checkpoint_every,
                    "valid_pairs": rule.valid_pairs,
                    "threads": rule.threads,
                }
            ),
        }
    )


def _small_images(paper: ImageExperiment, stages: int, rule: ImageRule) -> Experiment:
    model = replace(
        paper.model,
        filters=paper.model.filters // rule.filters_by,
        classes=rule.classes,
        channels=rule.channels,
        stem=rule.stem,
        norm_decay=rule.norm_decay,
    )
    return paper.model_copy(
        update={
            "scale": "laptop",
            "model": model,
            "images": ImageSettings(source=rule.source, size=rule.size, crop="shift", flip=True),
            "pipeline": paper.pipeline.model_copy(update={"stages": stages, "micro_batches": rule.micro_batches}),
            "optimizer": OptimizerSettings(
                learning_rate=rule.learning_rate,
                warmup_steps=rule.warmup_steps,
                decay="cosine",
                decay_steps=rule.steps - rule.warmup_steps,
                beta2=0.99,
            ),
            "train": paper.train.model_copy(
                update={
                    "steps": rule.steps,
                    "batch_images": rule.batch_images,
                    "checkpoint_every": rule.checkpoint_every,
                }
            ),
        }
    )


def with_changes(paper: Experiment, chosen: Experiment) -> Experiment:
    """Returns ``chosen`` with every difference to the paper's numbers in ``shrunk``, whoever made it."""
    return chosen.model_copy(update={"shrunk": tuple(changes(paper, chosen))})


def changes(before: Experiment, after: Experiment) -> list[str]:
    """Returns a line for each setting in which two experiments differ, such as ``model.width 1024 -> 64``."""
    old, new = before.model_dump(), after.model_dump()
    sections: list[str] = [name for name, value in old.items() if isinstance(value, dict)]
    return [
        f"{section}.{field} {_short(value)} -> {_short(new[section][field])}"
        for section in sections
        for field, value in old[section].items()
        if value != new[section][field]
    ]


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value).lower() if value is None else str(value)
