"""From the paper's numbers to the devices at hand, by one declared rule for all runs, and never silently."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

from experiments.cluster import GIB, Cluster
from experiments.experiment import Experiment
from experiments.image_experiment import ImageExperiment
from experiments.planning import attempt, estimated_price, make
from experiments.tasks import workload
from experiments.text_experiment import TranslationExperiment
from experiments.workload import Workload
from suite.errors import PlacementError, PlanError, SettingError
from suite.settings import ImageSettings, OptimizerSettings

Asked = Literal["auto", "paper", "laptop"]


@dataclass(frozen=True)
class TextRule:
    """What ``laptop`` divides the sizes of a run on text by, and what it sets. Depth is never touched."""

    width_by: int = 16
    feed_forward_by: int = 64
    heads_by: int = 16
    head_width_by: int = 2
    vocabulary_by: int = 32
    corpus: str = "catalogues"
    max_tokens: int = 48
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
    clip_norm: float | None = 1.0
    precision: Literal["fp32", "bf16"] = "fp32"


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


def laptop(paper: Experiment, cluster: Cluster) -> Experiment:
    """Returns the experiment small enough for a few CPU cores, every change listed in ``shrunk``.

    K becomes the number of devices if that is less; but on cores, which can take turns, a run that the paper pipelines
    stays a pipeline of at least 2. A run that is made for a laptop stays as it is.
    """
    if paper.scale == "laptop":
        return paper
    least = min(paper.pipeline.stages, 2) if cluster.kind == "cpu" else 1
    stages = max(min(paper.pipeline.stages, cluster.devices), least)
    if isinstance(paper, TranslationExperiment):
        return with_changes(paper, _small_text(paper, stages, TEXT))
    assert isinstance(paper, ImageExperiment), type(paper)
    return with_changes(paper, _small_images(paper, stages, IMAGES))


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
                width=paper.model.width // rule.width_by,
                feed_forward=paper.model.feed_forward // rule.feed_forward_by,
                heads=paper.model.heads // rule.heads_by,
                head_width=paper.model.head_width // rule.head_width_by,
                vocabulary=vocabulary,
                dropout=rule.dropout,
            ),
            "text": paper.text.model_copy(
                update={"corpus": rule.corpus, "vocabulary": vocabulary, "max_tokens": rule.max_tokens}
            ),
            "pipeline": paper.pipeline.model_copy(
                update={"stages": stages, "micro_batches": rule.micro_batches, "replicas": 1}
            ),
            "optimizer": OptimizerSettings(
                name=rule.optimizer,
                learning_rate=rule.learning_rate,
                warmup_steps=rule.warmup_steps,
                clip_norm=rule.clip_norm,
                precision=rule.precision,
            ),
            "train": paper.train.model_copy(
                update={
                    "steps": rule.steps,
                    "batch_tokens": rule.batch_tokens,
                    "checkpoint_every": rule.checkpoint_every,
                    "valid_pairs": rule.valid_pairs,
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


def choose_scale(
    paper: Experiment, asked: Asked, cluster: Cluster, settings: Iterable[str] = ()
) -> tuple[Experiment, str]:
    """Returns the experiment at the scale asked for, a person's settings applied, and one line saying what was shrunk.

    ``auto`` takes the paper's numbers where the cluster holds them and laptop elsewhere. Raises PlacementError when
    ``paper`` is asked for and the cluster does not hold it, SettingError for a bad setting.
    """
    settings = list(settings)
    if paper.scale == "laptop":
        if asked == "paper":
            raise SettingError(f"{paper.name} is no run of the paper's and has no scale paper; leave SCALE out")
        chosen = onto(paper.with_settings(settings), cluster)
        changed = f"shrunk: {', '.join(chosen.shrunk)}" if chosen.shrunk else "nothing shrunk"
        return chosen, f"{paper.name} as it is, {changed}"
    if asked == "laptop":
        return _shrunk(paper, cluster, settings, "as asked")
    try:
        whole = paper.with_settings(settings)
    except SettingError as fault:
        if asked == "paper":
            raise
        return _shrunk(paper, cluster, settings, f"as at scale paper {fault}")  # raises again if wrong at any scale
    lack = find_lack(whole, cluster)
    if lack is None:
        return whole, f"{paper.name} at scale paper, nothing shrunk"
    if asked == "paper":
        raise PlacementError(f"SCALE=paper of {paper.name} {lack}; {_mend(whole, cluster)}, or SCALE=laptop")
    return _shrunk(paper, cluster, settings, f"as paper {lack}")


def find_lack(experiment: Experiment, cluster: Cluster) -> str | None:
    """Returns what is needed to run these numbers and what there is; None when the cluster holds them.

    Bytes are estimated on the meta device (``suite.pipeline.estimate``).
    """
    work, pipeline = workload(experiment), experiment.pipeline
    if cluster.kind == "gpu" and _fits(work, cluster):
        return None
    enough = _boundless(experiment)
    try:
        planned = attempt(work, enough, estimated_price)
    except PlanError as fault:
        return f"cannot run as it is set: {'; '.join(fault.faults)}"
    tenths = math.ceil(10 * max(stage.peak_bytes for stage in planned.plan.stages) / GIB)
    while not _fits(work, replace(enough, bytes_per_device=tenths * GIB // 10)):
        tenths = math.ceil(1.01 * tenths)  # a cut under a cap leaves messages some room, so it asks for a little more
    return (
        f"needs {enough.devices} GPUs (K = {pipeline.stages} stages x R = {pipeline.replicas} replicas) "
        f"with {tenths / 10:.1f} GiB each, and there are {cluster}"
    )


def _fits(work: Workload, cluster: Cluster) -> bool:
    try:
        attempt(work, cluster, estimated_price)
    except PlanError:
        return False
    return True


def _mend(experiment: Experiment, cluster: Cluster) -> str:
    """Returns what to do about a lack: the first plan that fits, if there are devices for one."""
    try:
        make(workload(experiment), cluster if cluster.kind == "gpu" else _boundless(experiment), estimated_price)
    except PlanError as fault:
        if fault.remedies:
            return f"use {fault.remedies[0].partition(':')[0]}"
    return "use a cluster that has them"


def _boundless(experiment: Experiment) -> Cluster:
    """Returns as many devices as are asked for, large enough for anything."""
    return Cluster(experiment.pipeline.stages * experiment.pipeline.replicas, 2**62, "gpu")


HEADLINES = (
    *("model.width", "model.feed_forward", "model.heads", "model.filters"),
    *("text.", "images.source", "images.size", "pipeline.", "train.batch", "train.steps"),
)
"""Beginnings of the settings whose change is said in the one line; all of them stand in ``shrunk``."""


def _shrunk(paper: Experiment, cluster: Cluster, settings: list[str], why: str) -> tuple[Experiment, str]:
    small = with_changes(paper, laptop(paper, cluster).with_settings(settings))
    said = [line for line in small.shrunk if line.startswith(HEADLINES)]
    rest = len(small.shrunk) - len(said)
    line = f"{paper.name} at scale laptop, {why}: {', '.join(said)}, and {rest} more in experiment.toml"
    return small, line


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value).lower() if value is None else str(value)
