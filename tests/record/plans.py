"""Plans of models on clusters, and refusals: what ``gpipe plan`` says, with all its numbers."""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from tests.launch.command_line import ROOT, call
from tests.record.costs import Costs, feed, two_cores
from tests.record.job import Job

SMALL = ("vision", "half", "skip", "tied")
"""Of ``models.py``."""

LARGE = ("t64_3b", "t128_6b", "transformer_1663", "amoebanet_imagenet")

MODELS = ("t12_400m", "t24_1_3b_wide", "t48_1_3b_deep", "transformer_103", *LARGE, *SMALL)

TWO_CORES = "two cores"
CLUSTERS = ("2x8xA100-40GB", "4x8xH100", "16x8xH100", "8x16GiB", "128x16GiB", TWO_CORES)

ARGUMENTS = {
    "default": ("",),
    "auto": ("pipeline.schedule=auto",),
    "one stage": ("pipeline.stages=1 pipeline.replicas=1 pipeline.micro_batches=1",),
    "best": ("", "--best"),
}
"""Settings, and options; one stage with one micro-batch is what many devices refuse."""

OF_LARGE = ("4x8xH100", "8x16GiB", TWO_CORES)
"""The clusters on which a schedule is searched for the large models: a search takes a minute."""

BEST = {
    "2x8xA100-40GB": ("t12_400m", "t64_3b", *SMALL),
    "4x8xH100": ("t24_1_3b_wide", "transformer_103"),
    "16x8xH100": ("t128_6b",),
    "8x16GiB": ("t12_400m", "t48_1_3b_deep", "amoebanet_imagenet", *SMALL),
    TWO_CORES: MODELS,
}
"""The models with BEST=1 by cluster: all of them would take two hours."""

AN_EIGHTH = {
    "t": ("train.batch_tokens=500000", "pipeline.micro_batches=32"),
    "amoebanet": ("train.batch_images=128", "pipeline.micro_batches=16"),
}
"""Mini-batches an eighth of the paper's, and fewer micro-batches, by the begin of a name: thousands take minutes."""

WHOLE = {("t128_6b", "16x8xH100", "best"), ("t128_6b", "4x8xH100", "default"), ("t12_400m", "8x16GiB", "default")}
"""Plans with the paper's mini-batches all the same."""

KEPT = (
    "K", "M", "R", "schedule", "virtual_stages", "remat", "recomputed", "forwards", "cells", "step_s",
    "step_interval_s", "lower_bound_s", "bubble", "hours", "parameters", "schedules", "settings",
)  # fmt: skip

_costs: Costs | None = None
"""Of this process."""


def plan_jobs(work: Path, saved: dict[str, Any]) -> Iterator[Job]:
    for cluster, model in product(CLUSTERS, MODELS):
        yield _job(model, cluster, "default", saved)
        if model not in LARGE or cluster in OF_LARGE:
            yield _job(model, cluster, "auto", saved)
        if cluster in OF_LARGE:
            yield _job(model, cluster, "one stage", saved)


def best_jobs(work: Path, saved: dict[str, Any]) -> Iterator[Job]:
    for cluster, models in BEST.items():
        for model in models:
            yield _job(model, cluster, "best", saved)


def _job(model: str, cluster: str, request: str, saved: dict[str, Any]) -> Job:
    own = {key: value for key, value in saved.items() if key.startswith(f"{model} on ")}
    return Job(f"{model} on {cluster}, {request}", plan, (model, cluster, request, own))


def settings(model: str, cluster: str, request: str) -> str:
    """Returns the settings of a request."""
    begin = re.split(r"[0-9_]", model)[0]
    if cluster == TWO_CORES or (model, cluster, request) in WHOLE or begin not in AN_EIGHTH or request == "one stage":
        return ARGUMENTS[request][0]
    batch, micro_batches = AN_EIGHTH[begin]
    return f"{ARGUMENTS[request][0]} {batch} {'' if request == 'best' else micro_batches}"


def plan(model: str, cluster: str, request: str, saved: dict[str, Any]) -> dict[str, Any]:
    """Returns the plan, the CPU seconds it took, and the costs it asked for."""
    global _costs
    if _costs is None:
        _costs = Costs({})
        feed(_costs)
        two_cores(_costs)
    _costs.saved, _costs.own, _costs.model = saved, {}, model
    name = f"{Path(__file__).with_name('models.py')}:{model}" if model in SMALL else model
    where = () if cluster == TWO_CORES else ("--cluster", cluster)
    arguments = ("plan", name, "--set", settings(model, cluster, request), *ARGUMENTS[request][1:], *where)
    begin = time.process_time()
    with tempfile.TemporaryDirectory() as folder:  # without prepared data
        code, out, errors = call(*arguments, "--format", "json", folder=folder)
    seconds = time.process_time() - begin
    if code:
        refusal = errors[errors.index("error: ") :].replace(str(ROOT), "ROOT").splitlines()  # after lines of progress
        return {"result": {"refused": refusal}, "cpu_s": seconds, "costs": _costs.own}
    found = json.loads(out)
    plans = [kept(each) for each in found] if isinstance(found, list) else kept(found)
    return {"result": {"plan": plans}, "cpu_s": seconds, "costs": _costs.own}


def kept(found: dict[str, Any]) -> dict[str, Any]:
    """Returns the numbers of a plan."""
    peaks = {"peak_bytes": [stage["peak_bytes"] for stage in found["stages"]]}
    return {name: found[name] for name in KEPT if name in found} | peaks
