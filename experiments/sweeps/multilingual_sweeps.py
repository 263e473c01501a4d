"""The sweeps on the multilingual models of section 5 and their bilingual baselines."""

from __future__ import annotations

from experiments.base.cluster import Cluster
from experiments.sweeps.members.base import Member
from experiments.sweeps.members.multilingual import (
    BILINGUAL,
    DEPTH_WIDTH,
    MODELS,
    SMALLEST,
    baselines,
    member,
    model,
    multilingual,
    seeds,
)
from experiments.sweeps.report.verdicts import beats_bilingual, bigger_is_better, depth_beats_width
from experiments.sweeps.text_base import TextSweep

DEPTH_WIDTH_SWEEP = TextSweep(
    DEPTH_WIDTH,
    "Depth against width",
    "Five sizes of one multilingual model on the same text, tokens, update and seeds; the deep and the wide one have "
    "equal parameters. Each bilingual baseline has the shape of the smallest and trains as many steps on its language.",
    lambda scale, cluster: [*multilingual(MODELS, scale, cluster), *baselines(scale, cluster)],
    (depth_beats_width, bigger_is_better, beats_bilingual),
)
"""The five runs of section 5, and the bilingual baselines of their figure.

t12_400m  T(6, 8192, 16)  --twice as deep and twice as wide-->  t24_1_3b_wide  T(12, 16384, 32)  --> t64_3b --> t128_6b
                          --four times as deep------------->    t48_1_3b_deep  T(24, 8192, 16)
"""

GROWING = tuple(name for name in MODELS if "deep" not in name)
"""The sizes that grow in depth and width together: 400M, 1.3B, 3B, 6B."""

CAPACITY_SWEEP = TextSweep(
    "capacity",
    "Capacity",
    "One multilingual model in growing sizes on the same text, tokens, update and seeds.",
    lambda scale, cluster: [*multilingual(GROWING, scale, cluster), *baselines(scale, cluster)],
    (bigger_is_better, beats_bilingual),
)
"""Its runs are those of ``depth_width``."""

BILINGUAL_SWEEP = TextSweep(
    BILINGUAL,
    "One multilingual model against bilingual ones",
    "The smallest multilingual model beside a bilingual one for each language: the same shape, steps and tokens per "
    "step, so a baseline sees several times as much of its language as the multilingual model does.",
    lambda scale, cluster: [*multilingual((SMALLEST,), scale, cluster), *baselines(scale, cluster)],
    (beats_bilingual,),
)
"""The smallest multilingual model has the shape of the baselines."""

TEMPERATURE = "temperature"
OTHER_TEMPERATURES = (1.0, 100.0)
"""The temperatures beside the runs' own 5."""


def _temperature_members(scale: str, cluster: Cluster) -> list[Member]:
    members = multilingual((SMALLEST,), scale, cluster)
    for seed in seeds(scale):
        for temperature in OTHER_TEMPERATURES:
            run = model(SMALLEST, scale, cluster, seed)
            run = run.model_copy(update={"text": run.text.model_copy(update={"temperature": temperature})})
            name, label = f"{SMALLEST}-T{temperature:g}", f"{SMALLEST}, T = {temperature:g}"
            members.append(member(TEMPERATURE, scale, name, seed, label, run))
    return [*members, *baselines(scale, cluster)]


TEMPERATURE_SWEEP = TextSweep(
    TEMPERATURE,
    "Temperature of sampling",
    "The smallest multilingual model at three temperatures T of p_l ~ D_l^(1/T), all else equal: T = 1 draws languages "
    f"in proportion to their text, 100 almost uniformly; {SMALLEST} without a T has T = 5.",
    _temperature_members,
)
