"""Shrinks the paper's runs to the available devices, by declared rules for all runs, and records every change.

Scale ``laptop`` keeps the depth of a single run, scale ``slice`` its widths. Sweeps
(``experiments/sweeps/members/base.py``) have their own rules, ``SWEEPS``: many runs share an hour, so they also divide
the depth, by the same number for all runs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from experiments.base.cluster import Cluster
from experiments.base.experiment import Experiment
from experiments.images.experiment import ImageExperiment
from experiments.language_model.experiment import LanguageModelExperiment
from experiments.translation.experiment import TranslationExperiment
from suite.errors import SettingError
from suite.paths import hide_secrets
from suite.settings import DocumentSettings, ImageSettings, OptimizerSettings, Remat, ScheduleName


@dataclass(frozen=True)
class TextRule:
    """Scale ``laptop``'s divisors for the sizes of a run on text, and its settings. Only sweeps divide the depth."""

    layers_by: float = 1
    most_layers: int | None = None
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


@dataclass(frozen=True)
class SweepRule:
    """How a scale shrinks the runs of a sweep on text, and the size of the sweep.

    All compared runs have equal text, optimizer, seeds and largest budget (``batch_tokens`` x ``steps``). Each trains
    until its validations stop improving, and its best checkpoint is scored. Deep and wide models have equal parameters:
    all depths are divided by one number and all widths by one number, so T(24, H, A) and T(12, 2H, 2A) become
    T(24/n, h, a) and T(12/n, 2h, 2a).

    A bilingual baseline has one language in both directions and the shape of T(6, 8192, 16), the smallest of the five
    (the paper's baselines have 350M parameters, its smallest model 400M), or a smaller one: it is tuned
    (``experiments/sweeps/members/tuning.py``).
    """

    text: TextRule | None
    """None: the paper's numbers."""
    baselines: tuple[str, ...]
    """Languages that get a bilingual baseline."""
    seeds: int
    models: tuple[str, ...] | None = None
    """Names of the runs of section 5 that are compared; None: all five."""
    validate_every: int | None = None
    """Steps between two validations; None: the last checkpoint is scored."""
    patience: int | None = None
    """Validations without improvement that end a run."""
    beam: int = 4
    max_pairs: int | None = None
    """Test pairs of each direction that are decoded; None for all."""
    batches: tuple[float, float, float] = (0.26, 1.0, 4.0)
    """Mini-batches of the batch-size sweep, relative to ``batch_tokens``: the paper's 260K, 1M and 4M."""


@dataclass(frozen=True)
class ImageRule:
    """The same for a run on images: an available set, its size, and a few hundred steps."""

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


@dataclass(frozen=True)
class LanguageModelRule:
    """The same for a language model. Two cores cannot train more than ``most_layers`` blocks of this width."""

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


TEXT, IMAGES, LANGUAGE_MODEL = TextRule(), ImageRule(), LanguageModelRule()

SLICE = TextRule(
    most_layers=4, most_stages=2, width_by=1, feed_forward_by=1, heads_by=1, head_width_by=1, vocabulary_by=1,
    max_length=128, micro_batches=4, schedule="fill_drain", remat="except_last", batch_tokens=512, steps=30,
    checkpoint_every=15, valid_pairs=32, dropout=0.1, residual_scale=None, optimizer="adafactor", learning_rate=3e-3,
    warmup_steps=10, lr_decay="inverse_sqrt", max_grad_norm=None, precision="bf16",
)  # fmt: skip
"""The rule of scale ``slice``: the paper's widths, vocabulary, update, precision and recomputation, with few layers and
steps. Up to 500M parameters, which two cores and 16 GiB hold. It tests what paper scale computes, not what it learns.
"""

TINY_TEXT = TextRule(
    layers_by=12, width_by=64, feed_forward_by=512, head_width_by=8, vocabulary_by=50, corpus="django",
    corpus_languages=("de", "es", "nl"), train_pairs=("nl:200",), max_length=16, micro_batches=2, batch_tokens=128,
    steps=4, checkpoint_every=2, valid_pairs=16, warmup_steps=2, threads=1,
)  # fmt: skip
"""The rule of scale ``tiny``: it tests a sweep, and the models learn nothing."""

SWEEPS = {
    # Two languages of each third, one Romance and one Germanic, all with 300 test pairs or more. The corpus has few
    # test pairs of truly small languages, so Italian and Dutch are cut to 3,000 pairs, Galician and Danish to 500.
    "laptop": SweepRule(
        TextRule(
            layers_by=6, vocabulary_by=16, corpus_languages=("da", "de", "es", "gl", "it", "nl"),
            train_pairs=("it:3000", "nl:3000", "da:500", "gl:500"), max_length=20, batch_tokens=1024,
            steps=1500, checkpoint_every=500, valid_pairs=600, dropout=0.1, learning_rate=8e-3, warmup_steps=100,
            threads=1,
        ),
        baselines=("da", "de", "es", "gl", "it", "nl"),
        seeds=3,
        validate_every=100,
        patience=4,
        max_pairs=300,
    ),
    # The smallest, the wide and the deep model in six related languages, for more steps. The heads
    # of the deep model are together as wide as the model, those of the wide one twice as wide, as in the paper.
    "laptop_long": SweepRule(
        TextRule(
            layers_by=6, most_stages=1, heads_by=4, head_width_by=4, vocabulary_by=16,
            corpus_languages=("ca", "es", "fr", "gl", "it", "pt_BR"),
            train_pairs=("fr:3000", "it:3000", "ca:500", "gl:500"), max_length=20, micro_batches=1,
            batch_tokens=1024, steps=3000, checkpoint_every=1000, valid_pairs=600, dropout=0.1, learning_rate=8e-3,
            warmup_steps=100, threads=1,
        ),
        baselines=("ca", "gl"),
        seeds=3,
        models=("t12_400m", "t24_1_3b_wide", "t48_1_3b_deep"),
        validate_every=100,
        patience=8,
        max_pairs=300,
    ),
    # a test of the whole sweep in two minutes; the models learn nothing
    "tiny": SweepRule(
        TINY_TEXT,
        baselines=("de", "nl"),
        seeds=1,
        validate_every=1,
        patience=2,
        beam=1,
        max_pairs=3,
    ),
    # one GPU, all depths and languages; meant for about half an hour; it has not run
    "gpu": SweepRule(
        TextRule(
            width_by=4, feed_forward_by=16, heads_by=8, head_width_by=1, vocabulary_by=4, max_length=48,
            micro_batches=1, batch_tokens=16_384, steps=1500, checkpoint_every=750, valid_pairs=2048, dropout=0.1,
            learning_rate=2e-3, warmup_steps=150, lr_decay="cosine", precision="bf16",
        ),
        baselines=("af", "de", "eo", "es", "fur", "gl"),
        seeds=2,
        validate_every=250,
        patience=4,
        max_pairs=100,
    ),
    # its runs have the largest of the three batches
    "paper": SweepRule(
        None, baselines=("de", "fr", "cy", "ka", "gd", "yo"), seeds=1, batches=(0.065, 0.25, 1.0)
    ),
}  # fmt: skip
"""Scales of sweeps on text, by name. A short search chose the rate and its decay (docs/sweeps.md)."""


def for_laptop(paper: Experiment, cluster: Cluster) -> Experiment:
    """Returns the experiment small enough for a few CPU cores, with every change listed in ``shrunk``.

    K is at most the number of devices. On cores, which workers can share, a run that the paper pipelines keeps at least
    2 stages. A run designed for a laptop stays unchanged.
    """
    if paper.scale == "laptop":
        return paper
    if isinstance(paper, TranslationExperiment):
        return with_changes(paper, _small_text(paper, _stages(paper, cluster), TEXT))
    if isinstance(paper, LanguageModelExperiment):
        return with_changes(paper, _small_language_model(paper, cluster, LANGUAGE_MODEL))
    assert isinstance(paper, ImageExperiment), type(paper)
    return with_changes(paper, _small_images(paper, _stages(paper, cluster), IMAGES))


def for_slice(paper: Experiment, cluster: Cluster) -> Experiment:
    """Returns the run with the paper's widths and few layers over at most 2 stages, with every change listed in
    ``shrunk``.

    Raises SettingError for a run other than the paper's translation runs.
    """
    if paper.scale != "paper" or not isinstance(paper, TranslationExperiment):
        raise SettingError(f"{paper.name} has no scale slice, which is for the paper's translation runs; omit SCALE")
    return shrunk_by(paper, SLICE, cluster, "slice")


def shrunk_by(
    paper: TranslationExperiment, rule: TextRule, cluster: Cluster, scale: str = "laptop"
) -> TranslationExperiment:
    """Returns a run shrunk by a rule, with every change listed in ``shrunk``. A sweep's scale such as ``laptop_long``
    gives runs of scale ``laptop``."""
    stages = min(_stages(paper, cluster), rule.most_stages or paper.pipeline.stages)
    small = _small_text(paper, stages, rule).model_copy(update={"scale": scale.partition("_")[0]})
    changed = with_changes(paper, small)
    assert isinstance(changed, TranslationExperiment)
    return changed


def _stages(paper: Experiment, cluster: Cluster) -> int:
    least = min(paper.pipeline.stages, 2) if cluster.kind == "cpu" else 1
    return max(min(paper.pipeline.stages, cluster.devices), least)


def fit_to_cluster(experiment: Experiment, cluster: Cluster) -> Experiment:
    """Returns a run designed for a laptop with at most as many stages as GPUs; on cores it stays unchanged."""
    max_stages = max(1, cluster.devices)
    if cluster.kind == "cpu" or experiment.pipeline.stages <= max_stages:
        return experiment
    pipeline = experiment.pipeline.model_copy(update={"stages": max_stages, "layers_per_cell": None})
    return with_changes(experiment, experiment.model_copy(update={"pipeline": pipeline}))


def _small_text(paper: TranslationExperiment, stages: int, rule: TextRule) -> Experiment:
    vocabulary = paper.text.vocabulary // rule.vocabulary_by
    return paper.model_copy(
        update={
            "scale": "laptop",
            "model": replace(
                paper.model,
                layers=min(max(1, round(paper.model.layers / rule.layers_by)), rule.most_layers or paper.model.layers),
                width=paper.model.width // rule.width_by,
                feed_forward=paper.model.feed_forward // rule.feed_forward_by,
                heads=max(1, paper.model.heads // rule.heads_by),
                head_width=paper.model.head_width // rule.head_width_by,
                vocabulary=vocabulary,
                **_fields(rule, "dropout", "residual_scale"),
            ),
            "text": paper.text.model_copy(
                update={
                    "vocabulary": vocabulary,
                    **_fields(rule, "corpus", "max_length", "corpus_languages", "train_pairs"),
                }
            ),
            "pipeline": paper.pipeline.model_copy(
                update={
                    "stages": stages,
                    "micro_batches": rule.micro_batches or 2 * stages,
                    "schedule": rule.schedule,
                    "remat": rule.remat,
                    "replicas": 1,
                }
            ),
            "optimizer": OptimizerSettings(
                name=rule.optimizer,
                lr_decay_steps=(
                    paper.optimizer.lr_decay_steps
                    if rule.lr_decay == "inverse_sqrt"
                    else rule.steps - rule.warmup_steps
                ),
                **_fields(rule, "learning_rate", "warmup_steps", "lr_decay", "max_grad_norm", "precision"),
            ),
            "train": paper.train.model_copy(
                update=_fields(rule, "steps", "batch_tokens", "checkpoint_every", "valid_pairs", "threads")
            ),
        }
    )


def _small_images(paper: ImageExperiment, stages: int, rule: ImageRule) -> Experiment:
    model = replace(
        paper.model,
        filters=paper.model.filters // rule.filters_by,
        **_fields(rule, "classes", "channels", "stem", "norm_decay"),
    )
    return paper.model_copy(
        update={
            "scale": "laptop",
            "model": model,
            "images": ImageSettings(source=rule.source, size=rule.size, crop="random_shift", flip=True),
            "pipeline": paper.pipeline.model_copy(update={"stages": stages, "micro_batches": rule.micro_batches}),
            "optimizer": OptimizerSettings(
                learning_rate=rule.learning_rate,
                warmup_steps=rule.warmup_steps,
                lr_decay="cosine",
                lr_decay_steps=rule.steps - rule.warmup_steps,
                beta2=0.99,
            ),
            "train": paper.train.model_copy(update=_fields(rule, "steps", "batch_images", "checkpoint_every")),
        }
    )


def _small_language_model(paper: LanguageModelExperiment, cluster: Cluster, rule: LanguageModelRule) -> Experiment:
    stages = _stages(paper, cluster)
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
                **_fields(rule, "learning_rate", "warmup_steps"),
            ),
            "train": paper.train.model_copy(
                update=_fields(rule, "steps", "batch_sequences", "checkpoint_every", "valid_sequences")
            ),
        }
    )


def _fields(rule: TextRule | ImageRule | LanguageModelRule, *names: str) -> dict[str, Any]:
    return {name: getattr(rule, name) for name in names}


def with_changes(paper: Experiment, chosen: Experiment) -> Experiment:
    """Returns ``chosen`` with every difference from the paper's numbers in ``shrunk``."""
    return chosen.model_copy(update={"shrunk": tuple(changes(paper, chosen))})


def changes(before: Experiment, after: Experiment) -> list[str]:
    """Returns a line for each setting that differs between two experiments, such as ``model.width 1024 -> 64``."""
    old, new = before.model_dump(), after.model_dump()
    sections: list[str] = [name for name, value in old.items() if isinstance(value, dict)]
    return [
        f"{section}.{field} {_short(value)} -> {_short(new[section][field])}"
        for section in sections
        for field, value in old[section].items()
        if value != new[section][field]
    ]


def _short(value: Any) -> str:
    return (
        f"{value:g}" if isinstance(value, float) else str(value).lower() if value is None else hide_secrets(str(value))
    )
