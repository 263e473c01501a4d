"""The five multilingual runs of section 5, T(L, H, A) from 400M to 6B parameters, as the paper trained them; and one
for two cores, whose model is useful.

From the paper: L, H, A, width, vocabulary, K, mini-batches of up to 4M tokens. From papers of the same team on the same
corpus: T = 5, Adafactor, warm-up, dropout, label smoothing. Ours, because no paper prints them: R = 8; M = 256 (above
the paper's 4K at every K, and the smallest power of two with which all five fit 16 GiB per device); the longest
sentence; the clipping of the logits; no clipping of gradients (Adafactor clips its own updates); 100,000 steps.
"""

from __future__ import annotations

from experiments.translation.experiment import TranslationExperiment
from models.shape import TransformerShape
from suite.settings import OptimizerSettings, PipelineSettings, TextSettings, TrainSettings

# The paper's corpus (102 languages, 25 billion pairs) is private. OPUS-100 is the public replacement: 99 languages
# beside English, 55 million pairs.
CORPUS = "Helsinki-NLP/opus-100"

# "(3.0, 40K)" multiplies Vaswani's schedule, which has width^-0.5 in it, as that team's code does (Lingvo,
# lingvo/core/schedule.py, TransformerSchedule; tasks/mt/base_config.py: "for the big model, 3.0", 40000 steps):
# 3 / sqrt(1024 * 40000) = 4.7e-4 at the end of the warm-up. Adafactor multiplies a rate by the root mean square of the
# parameter, which here begins near width^-0.5, so the same step is the relative rate 3 / sqrt(40000) = 0.015.
# It also caps the rate at 1/sqrt(step), like Adafactor's authors (Shazeer and Stern, 2018, use min(0.01, .)): from step
# 19,230 on the cap applies, 0.0072 at most and 0.0050 at the end of the warm-up.
WARMUP_STEPS = 40_000
PEAK_RATE = 3.0 / WARMUP_STEPS**0.5


def t12_400m() -> TranslationExperiment:
    """T(6, 8192, 16), 408M parameters: Transformer Big with wider feed-forward layers. The paper prints no K."""
    return TranslationExperiment(
        name="t12_400m",
        scale="paper",
        model=TransformerShape(blocks_per_stack=6, width=1024, feed_forward=8192, heads=16, vocabulary=64_000),
        text=TextSettings(corpus=CORPUS, vocabulary=64_000, temperature=5.0, max_length=128),
        pipeline=PipelineSettings(stages=1, micro_batches=256, replicas=8, remat="auto"),
        optimizer=OptimizerSettings(
            name="adafactor", learning_rate=PEAK_RATE, warmup_steps=WARMUP_STEPS, max_grad_norm=None, precision="bf16"
        ),
        train=TrainSettings(steps=100_000, batch_tokens=4_000_000, checkpoint_every=1000, valid_pairs=4096),
    )


def t24_1_3b_wide() -> TranslationExperiment:
    """T(12, 16384, 32), 1.24B parameters: the wide model of the depth-width pair."""
    return _derived("t24_1_3b_wide", blocks=12, feed_forward=16_384, heads=32, stages=2)


def t48_1_3b_deep() -> TranslationExperiment:
    """T(24, 8192, 16), 1.24B parameters: as large as the wide model, but clearly better on low-resource languages."""
    return _derived("t48_1_3b_deep", blocks=24, feed_forward=8192, heads=16, stages=4)


def t64_3b() -> TranslationExperiment:
    """T(32, 16384, 32), 3.09B parameters."""
    return _derived("t64_3b", blocks=32, feed_forward=16_384, heads=32, stages=8)


def t128_6b() -> TranslationExperiment:
    """T(64, 16384, 32), 6.04B parameters: 64 encoder and 64 decoder layers over 16 stages, the paper's largest."""
    return _derived("t128_6b", blocks=64, feed_forward=16_384, heads=32, stages=16)


def _derived(name: str, *, blocks: int, feed_forward: int, heads: int, stages: int) -> TranslationExperiment:
    """Returns the 400M run with another shape and K. All else is equal, so that runs are comparable."""
    base = t12_400m()
    model = TransformerShape(blocks, base.model.width, feed_forward, heads, base.model.vocabulary)
    pipeline = base.pipeline.model_copy(update={"stages": stages})
    return base.model_copy(update={"name": name, "model": model, "pipeline": pipeline})


MULTILINGUAL_RUNS = (t12_400m, t24_1_3b_wide, t48_1_3b_deep, t64_3b, t128_6b)
"""The five runs of section 5, smallest first; sweeps compare them."""


ROMANCE = ("ca", "es", "gl", "it", "pt_BR")
"""Related languages, which help each other: a model of this size learns little from five unrelated ones."""


def romance_strings() -> TranslationExperiment:
    """T(3, 512, 4) between English and five Romance languages, on texts of free software: 40 minutes on two cores."""
    steps, warmup = 5000, 200
    return TranslationExperiment(
        name="romance_strings",
        scale="laptop",
        model=TransformerShape(3, width=128, feed_forward=512, heads=4, vocabulary=4000, head_width=32),
        text=TextSettings(
            corpus="catalogues", corpus_languages=ROMANCE, vocabulary=4000, temperature=2.0, max_length=24
        ),
        pipeline=PipelineSettings(stages=2, micro_batches=8, replicas=1, remat="auto"),
        optimizer=OptimizerSettings(
            name="adamw",
            learning_rate=4e-3,
            warmup_steps=warmup,
            lr_decay="cosine",
            lr_decay_steps=steps - warmup,
            beta2=0.98,
            max_grad_norm=1.0,
        ),
        train=TrainSettings(steps=steps, batch_tokens=2048, checkpoint_every=500, validate_every=250, valid_pairs=1000),
    )
