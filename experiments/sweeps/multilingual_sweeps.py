"""The sweeps on the multilingual models of section 5 and their bilingual baselines."""

from __future__ import annotations

from pathlib import Path

from experiments.base.cluster import Cluster
from experiments.sweeps.members.base import Member, Scoring, folder_name
from experiments.sweeps.members.multilingual import (
    BILINGUAL,
    DEPTH_WIDTH,
    MODELS,
    SMALLEST,
    baseline_label,
    baselines,
    member,
    model,
    multilingual,
    seeds,
    tuned_baselines,
)
from experiments.sweeps.members.scales import SWEEPS
from experiments.sweeps.report.verdicts import BEATS_BILINGUAL, BIGGER_IS_BETTER, DEPTH_BEATS_WIDTH, verdicts_on
from experiments.sweeps.text_base import text_sweep
from experiments.translation.runs import romance_strings

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
    scales=tuple(SWEEPS),
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
    scales=tuple(SWEEPS),
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
    run, scoring, folder = romance_strings(), Scoring(4, 300), folder_name(ROMANCE, scale)
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
