"""The sweeps on the multilingual models of section 5 and their bilingual baselines."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from experiments.base.cluster import Cluster
from experiments.sweeps.members.base import Member, Scoring, folder_name
from experiments.sweeps.members.scales import MODELS, RULES, SMALLEST, baseline_label
from experiments.sweeps.members.tuning import Baseline, Setting
from experiments.sweeps.report.verdicts import BEATS_BILINGUAL, BIGGER_IS_BETTER, DEPTH_BEATS_WIDTH, verdicts_on
from experiments.sweeps.text_base import text_sweep
from experiments.translation import runs as translation
from experiments.translation.experiment import TranslationExperiment
from experiments.translation.scales import shrunk_by

DEPTH_WIDTH, BILINGUAL = "depth_width", "bilingual"
"""Sweeps whose folders hold shared runs."""


def seeds(scale: str) -> range:
    return range(RULES[scale].seeds)


def model(name: str, scale: str, cluster: Cluster, seed: int, setting: Setting | None = None) -> TranslationExperiment:
    """Returns one of the five at a sweep's scale. Without a setting it has the rule's own."""
    run: TranslationExperiment = getattr(translation, name)()
    rule = RULES[scale]
    if rule.text is not None:
        run = shrunk_by(run, rule.text if setting is None else setting.applied(rule.text), cluster, scale)
    return run.with_settings(
        f"train.seed={seed} train.validate_every={rule.validate_every} train.patience={rule.patience}"
    )


def multilingual(names: Sequence[str], scale: str, cluster: Cluster) -> list[Member]:
    """Returns those of the named runs that the scale compares, with every seed, in the folders of the sweep
    ``depth_width``. They are ordered by seed, so that an interrupted sweep has runs to compare."""
    compared = RULES[scale].models or MODELS
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


def tuned_baselines(scale: str, cluster: Cluster) -> list[Baseline]:
    """Returns the baselines that are tuned: none at the paper's scale."""
    languages = RULES[scale].baselines if RULES[scale].text is not None else ()
    return [Baseline(baseline_label(each), partial(_baseline_run, each, scale, cluster)) for each in languages]


def baselines(scale: str, cluster: Cluster, runs: Path) -> list[Member]:
    """Returns the bilingual baselines of a scale, in the folders of the sweep ``bilingual``: the runs that tune them,
    and once these are finished, the tuned ones with every seed. At the paper's scale they are not tuned."""
    rule = RULES[scale]
    if rule.text is None:
        return [_baseline_run(each, scale, cluster, None, seed) for seed in seeds(scale) for each in rule.baselines]
    found = tuned_baselines(scale, cluster)
    tuning, tuned = ([each.tuning() for each in found], [each.tuned(rule.seeds, runs) for each in found])
    return list({member.folder: member for members in (*tuning, *tuned) for member in members}.values())


def member(sweep: str, scale: str, name: str, seed: int, label: str, experiment: TranslationExperiment) -> Member:
    """Returns a member in a sweep's folder, scored by the rule of its scale."""
    return Member(f"{folder_name(sweep, scale)}/{name}-{seed}", label, experiment, RULES[scale].scoring)


DEPTH_WIDTH_SWEEP = text_sweep(
    DEPTH_WIDTH,
    "Depth against width",
    "One multilingual model in several sizes on the same text, update and seeds, each trained until its validations "
    "stop improving, within a largest number of steps; the deep and the wide one have equal parameters. Bilingual "
    "models are those of the sweep bilingual, if it has run.",
    lambda scale, cluster, runs: multilingual(MODELS, scale, cluster),
    verdicts_on(DEPTH_BEATS_WIDTH, *BIGGER_IS_BETTER, *BEATS_BILINGUAL),
    others=baselines,
    tuned=tuned_baselines,
    scales=tuple(RULES),
)
"""The five runs of section 5; at scale ``laptop_long`` the three smallest.

t12_400m  T(6, 8192, 16)  --twice as deep and twice as wide-->  t24_1_3b_wide  T(12, 16384, 32)  --> t64_3b --> t128_6b
                          --four times as deep------------->    t48_1_3b_deep  T(24, 8192, 16)
"""

CAPACITY_SWEEP = text_sweep(
    "capacity",
    "Capacity",
    "One multilingual model in growing sizes on the same text, update and seeds, each trained until its validations "
    "stop improving, within a largest number of steps.",
    lambda scale, cluster, runs: multilingual([name for name in MODELS if "deep" not in name], scale, cluster),
    verdicts_on(*BIGGER_IS_BETTER),
)
"""Those runs of ``depth_width`` that grow in depth and width together: 400M, 1.3B, 3B, 6B."""

BILINGUAL_SWEEP = text_sweep(
    BILINGUAL,
    "One multilingual model against bilingual ones",
    "The smallest multilingual model beside a tuned bilingual one for each language. Each trains until its validations "
    "stop improving, within a largest number of steps.",
    lambda scale, cluster, runs: [*multilingual((SMALLEST,), scale, cluster), *baselines(scale, cluster, runs)],
    verdicts_on(*BEATS_BILINGUAL),
    tuned=tuned_baselines,
    scales=tuple(RULES),
)
"""The smallest multilingual model has the shape that the baselines have before they are tuned."""

TEMPERATURE = "temperature"


def _temperature_members(scale: str, cluster: Cluster, runs: Path) -> list[Member]:
    members = multilingual((SMALLEST,), scale, cluster)
    for seed in seeds(scale):
        for temperature in (1.0, 100.0):  # the runs' own is 5
            run = model(SMALLEST, scale, cluster, seed).with_settings(f"text.temperature={temperature}")
            name, label = f"{SMALLEST}-T{temperature:g}", f"{SMALLEST}, T = {temperature:g}"
            members.append(member(TEMPERATURE, scale, name, seed, label, run))
    return members


TEMPERATURE_SWEEP = text_sweep(
    TEMPERATURE,
    "Temperature of sampling",
    "The smallest multilingual model at three temperatures T of p_l ~ D_l^(1/T), all else equal: T = 1 draws languages "
    f"in proportion to their text, 100 almost uniformly; {SMALLEST} without a T has T = 5.",
    _temperature_members,
)

ROMANCE = "romance"


def _romance_members(scale: str, cluster: Cluster, runs: Path) -> list[Member]:
    run, scoring, folder = translation.romance_strings(), Scoring(4, 300), folder_name(ROMANCE, scale)
    # a quarter of its steps: more tokens of each language than the at most 23% of them that it sees of one
    settings = (
        f"train.steps={run.train.steps // 4} train.checkpoint_every=250 train.validate_every=125 "
        "pipeline.stages=1 pipeline.micro_batches=1"  # two run at a time
    )
    members = [Member(f"{folder}/{run.name}-0", run.name, run, scoring)]
    for language in run.text.corpus_languages or ():
        alone = run.with_settings(f"text.languages={language} {settings}")
        members.append(Member(f"{folder}/{language}-0", baseline_label(language), alone, scoring))
    return members


ROMANCE_SWEEP = text_sweep(
    ROMANCE,
    "A translation model that is useful",
    "romance_strings, one model for five related languages, beside a bilingual model for each: the same shape, text, "
    "split and update. A bilingual model has a quarter of its steps, and so more tokens of its language than "
    "romance_strings sees. Its best checkpoint is scored; it is not tuned.",
    _romance_members,
    scales=("laptop",),
)
