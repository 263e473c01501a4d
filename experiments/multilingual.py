"""What members of the sweeps on text are made of: the five multilingual runs and the bilingual baselines, by seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from experiments import translation
from experiments.cluster import Cluster
from experiments.scales import SWEEPS, swept
from experiments.sweep import Member, Scoring, folder_name
from experiments.text_experiment import TranslationExperiment

MODELS = tuple(
    run.__name__
    for run in (
        translation.t12_400m,
        translation.t24_1_3b_wide,
        translation.t48_1_3b_deep,
        translation.t64_3b,
        translation.t128_6b,
    )
)
"""The five of section 5, smallest first."""

SMALLEST = MODELS[0]
"""Also the shape of every baseline."""

DEPTH_WIDTH, BILINGUAL = "depth_width", "bilingual"
"""Sweeps whose folders hold the runs that others share."""


def seeds(scale: str) -> range:
    """Returns the seeds of each run at a scale."""
    return range(SWEEPS[scale].seeds)


def model(name: str, scale: str, cluster: Cluster, seed: int) -> TranslationExperiment:
    """Returns one of the five at a sweep's scale."""
    run = swept(getattr(translation, name)(), scale, cluster)
    return run.model_copy(update={"train": run.train.model_copy(update={"seed": seed})})


def multilingual(names: Sequence[str], scale: str, cluster: Cluster) -> list[Member]:
    """Returns some of the five, every seed, in the folders of the sweep ``depth_width``: seed by seed, so that one that
    is broken off has something to compare."""
    return [
        member(DEPTH_WIDTH, scale, name, seed, name, model(name, scale, cluster, seed))
        for seed in seeds(scale)
        for name in names
    ]


def baseline(language: str, scale: str, cluster: Cluster, seed: int) -> TranslationExperiment:
    """Returns a bilingual run: the smallest of the five on one language in both directions, as many steps."""
    run = model(SMALLEST, scale, cluster, seed)
    return run.model_copy(update={"text": run.text.model_copy(update={"languages": (language,)})})


def baselines(scale: str, cluster: Cluster) -> list[Member]:
    """Returns the bilingual baselines of a scale, every seed, in the folders of the sweep ``bilingual``. They are run
    last: what they are compared with says something without them."""
    found = [
        member(BILINGUAL, scale, language, seed, baseline_label(language), baseline(language, scale, cluster, seed))
        for seed in seeds(scale)
        for language in SWEEPS[scale].baselines
    ]
    return [replace(one, priority=-1) for one in found]


def baseline_label(language: str) -> str:
    """Returns what the baselines of a language are called."""
    return f"bilingual {language}"


def member(sweep: str, scale: str, what: str, seed: int, label: str, experiment: TranslationExperiment) -> Member:
    """Returns a run that is scored as its scale says, in a sweep's folder."""
    rule = SWEEPS[scale]
    scoring = Scoring(rule.beam, rule.max_pairs)
    return Member(f"{folder_name(sweep, scale)}/{what}-{seed}", label, experiment, scoring)
