"""Capacity: the sizes that grow in depth and width together, 400M, 1.3B, 3B, 6B. Its runs are those of depth_width."""

from __future__ import annotations

from experiments.sweeps.members.multilingual import MODELS, baselines, multilingual
from experiments.sweeps.report.verdicts import beats_bilingual, bigger_is_better
from experiments.sweeps.text_base import TextSweep

GROWING = tuple(name for name in MODELS if "deep" not in name)

SWEEP = TextSweep(
    "capacity",
    "Capacity",
    "One multilingual model in growing sizes on the same text, tokens, update and seeds.",
    lambda scale, cluster: [*multilingual(GROWING, scale, cluster), *baselines(scale, cluster)],
    (bigger_is_better, beats_bilingual),
)
