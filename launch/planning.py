"""``make plan``: resolves a name for this machine, a Ray cluster or a declared one, and prints what it would cost."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from experiments.cluster import Cluster, parse_cluster
from experiments.image_workload import find_amoebanet
from experiments.language import find_language_model
from experiments.planned import Planned
from experiments.planning import adapted, make
from experiments.registry import experiments, find, resolve
from experiments.scale_choice import Asked
from experiments.tasks import data_folder, workload
from experiments.text_experiment import TranslationExperiment
from experiments.workload import Workload
from launch.devices import this_machine
from launch.progress import told_when_long
from launch.runs import CACHE
from launch.site import Site, site_of
from suite.errors import SettingError, nearest


def plan(name: str, cluster: str, scale: Asked, settings: str, form: str, console: Console) -> None:
    """Prints the plan of an experiment, ``transformer_<L>`` or ``amoebanet_<L>x<D>``; JSON is one object, nothing else.

    Raises SettingError for what is not understood, PlanError for what does not fit.
    """
    aside = Console(stderr=True) if form == "json" else console  # standard output is for the one object
    planned = make_named(name, cluster, scale, settings, lambda text: aside.print(text))
    if form == "json":
        print(json.dumps(planned.as_dict(), indent=1, allow_nan=False))
        return
    for line in planned.lines():
        console.print(line)


def make_named(name: str, cluster: str, scale: Asked, settings: str, say: Callable[[str], None]) -> Planned:
    """Returns the plan for a declared cluster, or for that of RAY_ADDRESS, or for this machine.

    On a declared cluster an experiment has the paper's numbers unless a scale is asked for, and as many replicas as
    there is room for.
    """
    _check(name, scale)
    site = Site() if cluster or not os.environ.get("RAY_ADDRESS") else site_of("ray")
    try:
        chosen = parse_cluster(cluster, this_machine()) if cluster else site.cluster()
        with told_when_long(f"planning {name}", say) as tell:
            wanted = _wanted(name, chosen, scale, settings)
            prices = site.pricer(CACHE / "costs", wanted.data, say)
            return make(wanted.work, chosen, prices, wanted.notes, wanted.given, tell)
    finally:
        site.close()


class _Wanted(NamedTuple):
    work: Workload
    given: str
    """The settings that make it so."""
    notes: tuple[str, ...] = ()
    """What was changed for this cluster."""
    data: Path | None = None
    """Where its prepared data are, if it has any and they are."""


def _check(name: str, scale: Asked) -> None:
    """Raises SettingError for a name or a scale that there is not, before any device is asked for."""
    if find_language_model(name, 1) is not None or find_amoebanet(name, 1) is not None:
        if scale == "laptop":
            raise SettingError(f"{name} has no scale laptop; it has the paper's numbers, or those of SET=")
    elif name not in experiments():
        known = [*experiments(), "transformer_<L>", "amoebanet_<L>x<D>"]
        raise SettingError(f"nothing to plan is called {name}; {nearest(name, known)}")


def _wanted(name: str, cluster: Cluster, scale: Asked, settings: str) -> _Wanted:
    model = find_language_model(name, cluster.devices)
    if model is not None:
        return _Wanted(model.with_settings(settings), settings)
    network = find_amoebanet(name, cluster.devices)
    if network is not None:
        return _Wanted(network.remade(network.experiment.with_settings(settings)), settings)
    return _experiment(name, cluster, scale, settings)


def _experiment(name: str, cluster: Cluster, scale: Asked, settings: str) -> _Wanted:
    if cluster.device is None:
        chosen, shrunk = resolve(name, scale, cluster, settings)
        data = data_folder(chosen, CACHE)
        if data.exists() or not isinstance(chosen, TranslationExperiment):
            there = data.resolve() if data.exists() else None
            return _Wanted(workload(chosen, data.resolve()), settings, (shrunk,), there)
        longest = f"the text is not prepared yet: micro-batches are taken as rows of {chosen.text.max_tokens} tokens"
        return _Wanted(workload(chosen), settings, (shrunk, longest))
    if scale == "laptop":
        chosen, shrunk = resolve(name, scale, cluster, settings)
        return _Wanted(workload(chosen), settings, (shrunk,))
    work = workload(find(name).with_settings(settings))
    if "pipeline.replicas" in settings:
        return _Wanted(work, settings)
    changed, notes = adapted(work, cluster)
    pipeline = changed.pipeline
    made = f" pipeline.replicas={pipeline.replicas} pipeline.micro_batches={pipeline.micro_batches}" if notes else ""
    return _Wanted(changed, settings + made, notes)
