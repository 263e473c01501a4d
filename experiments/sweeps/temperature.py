"""Temperature of sampling: languages drawn as p_l ~ D_l^(1/T), with T = 1 (as they come), 5 and 100 (all alike)."""

from __future__ import annotations

from experiments.base.cluster import Cluster
from experiments.sweeps.members.base import Member
from experiments.sweeps.members.multilingual import SMALLEST, baselines, member, model, multilingual, seeds
from experiments.sweeps.text_base import TextSweep

NAME = "temperature"
OTHERS = (1.0, 100.0)
"""Beside the runs' own 5."""


def _members(scale: str, cluster: Cluster) -> list[Member]:
    found = multilingual((SMALLEST,), scale, cluster)
    for seed in seeds(scale):
        for temperature in OTHERS:
            run = model(SMALLEST, scale, cluster, seed)
            run = run.model_copy(update={"text": run.text.model_copy(update={"temperature": temperature})})
            label = f"{SMALLEST}, T = {temperature:g}"
            found.append(member(NAME, scale, f"{SMALLEST}-T{temperature:g}", seed, label, run))
    return [*found, *baselines(scale, cluster)]


SWEEP = TextSweep(
    NAME,
    "Temperature of sampling",
    f"The smallest multilingual model at three temperatures T of p_l ~ D_l^(1/T), all else equal; {SMALLEST} without a "
    "word has T = 5.",
    _members,
)
