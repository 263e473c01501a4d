"""Members of the sweeps on text: the five multilingual runs and the bilingual baselines, by seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from experiments.base.cluster import Cluster
from experiments.scaling.scales import SWEEPS, scaled_for_sweep
from experiments.sweeps.members.base import Member, Scoring, folder_name
from experiments.translation import runs as translation
from experiments.translation.experiment import TranslationExperiment

MODELS = tuple(run.__name__ for run in translation.MULTILINGUAL_RUNS)
"""The five of section 5, smallest first."""

SMALLEST = MODELS[0]
"""The smallest run, whose shape every baseline has."""

DEPTH_WIDTH, BILINGUAL = "depth_width", "bilingual"
"""Sweeps whose folders hold shared runs."""


def seeds(scale: str) -> range:
    """Returns the seeds of each run at a scale."""
    return range(SWEEPS[scale].seeds)


def model(name: str, scale: str, cluster: Cluster, seed: int) -> TranslationExperiment:
    """Returns one of the five at a sweep's scale."""
    run = scaled_for_sweep(getattr(translation, name)(), scale, cluster)
    return run.model_copy(update={"train": run.train.model_copy(update={"seed": seed})})


def multilingual(names: Sequence[str], scale: str, cluster: Cluster) -> list[Member]:
    """Returns some of the five with every seed, in the folders of the sweep ``depth_width``. They are ordered by seed,
    so that an interrupted sweep has runs to compare."""
    return [
        member(DEPTH_WIDTH, scale, name, seed, name, model(name, scale, cluster, seed))
        for seed in seeds(scale)
        for name in names
    ]


def baseline(language: str, scale: str, cluster: Cluster, seed: int) -> TranslationExperiment:
    """Returns a bilingual run: the smallest of the five on one language in both directions, with equal steps."""
    run = model(SMALLEST, scale, cluster, seed)
    return run.model_copy(update={"text": run.text.model_copy(update={"languages": (language,)})})


def baselines(scale: str, cluster: Cluster) -> list[Member]:
    """Returns the bilingual baselines of a scale with every seed, in the folders of the sweep ``bilingual``. They run
    last, because the other runs are useful without them."""
    members = [
        member(BILINGUAL, scale, language, seed, baseline_label(language), baseline(language, scale, cluster, seed))
        for seed in seeds(scale)
        for language in SWEEPS[scale].baselines
    ]
    return [replace(baseline_member, priority=-1) for baseline_member in members]


def baseline_label(language: str) -> str:
    """Returns the label of a language's baselines."""
    return f"bilingual {language}"


def member(sweep: str, scale: str, name: str, seed: int, label: str, experiment: TranslationExperiment) -> Member:
    """Returns a member in a sweep's folder, scored by the rule of its scale."""
    rule = SWEEPS[scale]
    scoring = Scoring(rule.beam, rule.max_pairs)
    return Member(f"{folder_name(sweep, scale)}/{name}-{seed}", label, experiment, scoring)
