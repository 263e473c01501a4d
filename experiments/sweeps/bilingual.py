"""Bilingual baselines, and the smallest multilingual model, which has their shape."""

from __future__ import annotations

from experiments.sweeps.members.multilingual import BILINGUAL, SMALLEST, baselines, multilingual
from experiments.sweeps.report.verdicts import beats_bilingual
from experiments.sweeps.text_base import TextSweep

SWEEP = TextSweep(
    BILINGUAL,
    "One multilingual model against bilingual ones",
    "The smallest multilingual model beside a bilingual one for each language: the same shape, steps and tokens a "
    "step, so a baseline sees several times as much of its language as the multilingual model does.",
    lambda scale, cluster: [*multilingual((SMALLEST,), scale, cluster), *baselines(scale, cluster)],
    (beats_bilingual,),
)
