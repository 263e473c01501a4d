"""Members of the sweeps on text: the five multilingual runs and the bilingual baselines, by seed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from experiments.base.cluster import Cluster
from experiments.sweeps.members.base import Member, folder_name
from experiments.sweeps.members.scales import SWEEPS
from experiments.sweeps.members.tuning import BaselineRuns, Setting, tuned_members, tuning_members
from experiments.translation import runs as translation
from experiments.translation.experiment import TranslationExperiment
from experiments.translation.scales import shrunk_by

MODELS = tuple(run.__name__ for run in translation.MULTILINGUAL_RUNS)
"""The five of section 5, smallest first."""

SMALLEST = MODELS[0]
"""The smallest run, whose shape a baseline has before it is tuned."""

DEPTH_WIDTH, BILINGUAL = "depth_width", "bilingual"
"""Sweeps whose folders hold shared runs."""


def seeds(scale: str) -> range:
    return range(SWEEPS[scale].seeds)


def model(name: str, scale: str, cluster: Cluster, seed: int, setting: Setting | None = None) -> TranslationExperiment:
    """Returns one of the five at a sweep's scale. Without a setting it has the rule's own."""
    run: TranslationExperiment = getattr(translation, name)()
    rule = SWEEPS[scale]
    if rule.text is not None:
        run = shrunk_by(run, rule.text if setting is None else setting.applied(rule.text), cluster, scale)
    return run.with_settings(
        f"train.seed={seed} train.validate_every={rule.validate_every} train.patience={rule.patience}"
    )


def multilingual(names: Sequence[str], scale: str, cluster: Cluster) -> list[Member]:
    """Returns those of the named runs that the scale compares, with every seed, in the folders of the sweep
    ``depth_width``. They are ordered by seed, so that an interrupted sweep has runs to compare."""
    compared = SWEEPS[scale].models or MODELS
    return [
        member(DEPTH_WIDTH, scale, name, seed, name, model(name, scale, cluster, seed))
        for seed in seeds(scale)
        for name in names
        if name in compared
    ]


def baseline(
    language: str, scale: str, cluster: Cluster, seed: int, setting: Setting | None = None
) -> TranslationExperiment:
    """Returns a bilingual run: the smallest of the five on one language in both directions."""
    run = model(SMALLEST, scale, cluster, seed, setting)
    pairs = [limit for limit in run.text.train_pairs or () if limit.startswith(f"{language}:")]
    return run.with_settings(f"text.languages={language} text.train_pairs={','.join(pairs) or 'none'}")


def _baseline_run(language: str, scale: str, cluster: Cluster, setting: Setting | None, seed: int) -> Member:
    experiment = baseline(language, scale, cluster, seed, setting)
    name = language if setting is None else f"{language}-{setting.folder_name}"
    return member(BILINGUAL, scale, name, seed, baseline_label(language), experiment)


def tuned_baselines(scale: str, cluster: Cluster) -> list[tuple[str, BaselineRuns]]:
    """Returns the label and the runs of each baseline that is tuned: none at the paper's scale."""
    if SWEEPS[scale].text is None:
        return []
    return [(baseline_label(each), partial(_baseline_run, each, scale, cluster)) for each in SWEEPS[scale].baselines]


def baselines(scale: str, cluster: Cluster, runs: Path) -> list[Member]:
    """Returns the bilingual baselines of a scale, in the folders of the sweep ``bilingual``: the runs that tune them,
    and once these are finished, the tuned ones with every seed. At the paper's scale they are not tuned."""
    rule = SWEEPS[scale]
    if rule.text is None:
        return [_baseline_run(each, scale, cluster, None, seed) for seed in seeds(scale) for each in rule.baselines]
    runs_of_languages = [alone for _, alone in tuned_baselines(scale, cluster)]
    members = [member for alone in runs_of_languages for member in tuning_members(alone)]
    for alone in runs_of_languages:
        members += tuned_members(alone, rule.seeds, runs)
    return list({member.folder: member for member in members}.values())


def baseline_label(language: str) -> str:
    return f"bilingual {language}"


def member(sweep: str, scale: str, name: str, seed: int, label: str, experiment: TranslationExperiment) -> Member:
    """Returns a member in a sweep's folder, scored by the rule of its scale."""
    return Member(f"{folder_name(sweep, scale)}/{name}-{seed}", label, experiment, SWEEPS[scale].scoring)
