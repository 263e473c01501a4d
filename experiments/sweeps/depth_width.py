"""Depth against width: the five runs of section 5, and the bilingual baselines that their figure is drawn against.

t12_400m  T(6, 8192, 16)  --twice as deep and twice as wide-->  t24_1_3b_wide  T(12, 16384, 32)  --> t64_3b --> t128_6b
                          --four times as deep------------->    t48_1_3b_deep  T(24, 8192, 16)
"""

from __future__ import annotations

from experiments.sweeps.members.multilingual import DEPTH_WIDTH, MODELS, baselines, multilingual
from experiments.sweeps.report.verdicts import beats_bilingual, bigger_is_better, depth_beats_width
from experiments.sweeps.text_base import TextSweep

SWEEP = TextSweep(
    DEPTH_WIDTH,
    "Depth against width",
    "Five sizes of one multilingual model on the same text, tokens, update and seeds; the deep and the wide one have "
    "equal parameters. Each bilingual baseline has the shape of the smallest and trains as many steps on its language.",
    lambda scale, cluster: [*multilingual(MODELS, scale, cluster), *baselines(scale, cluster)],
    (depth_beats_width, bigger_is_better, beats_bilingual),
)
