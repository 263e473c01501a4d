"""``make plan``: resolves a name for this machine or for a declared cluster, and prints what it would cost."""

from __future__ import annotations

import json
from collections.abc import Callable

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
from launch.pricing import pricer
from launch.runs import CACHE
from suite.errors import SettingError, nearest


def plan(name: str, cluster: str, scale: Asked, settings: str, form: str, console: Console) -> None:
    """Prints the plan of an experiment, ``transformer_<L>`` or ``amoebanet_<L>x<D>``; JSON is one object, nothing else.

    Raises SettingError for what is not understood, PlanError for what does not fit.
    """
    say = _quiet if form == "json" else lambda text: console.print(text)
    planned = make_named(name, cluster, scale, settings, say)
    if form == "json":
        print(json.dumps(planned.as_dict(), indent=1, allow_nan=False))
        return
    for line in planned.lines():
        console.print(line)


def make_named(name: str, cluster: str, scale: Asked, settings: str, say: Callable[[str], None]) -> Planned:
    """Returns the plan. On a declared cluster an experiment has the paper's numbers unless a scale is asked for, and
    as many replicas as there is room for."""
    machine = this_machine()
    chosen = parse_cluster(cluster, machine) if cluster else machine
    prices = pricer(CACHE / "costs", say)
    model = find_language_model(name, chosen.devices)
    if model is not None:
        if scale == "laptop":
            raise SettingError(f"{name} has no scale laptop; it has the paper's numbers, or those of SET=")
        return make(model.with_settings(settings), chosen, prices, given=settings)
    network = find_amoebanet(name, chosen.devices)
    if network is not None:
        if scale == "laptop":
            raise SettingError(f"{name} has no scale laptop; it has Table 1's numbers, or those of SET=")
        changed = network.remade(network.experiment.with_settings(settings))
        return make(changed, chosen, prices, given=settings)
    if name not in experiments():
        known = [*experiments(), "transformer_<L>", "amoebanet_<L>x<D>"]
        raise SettingError(f"nothing to plan is called {name}; {nearest(name, known)}")
    work, notes, given = _experiment(name, chosen, scale, settings)
    return make(work, chosen, prices, notes, given)


def _experiment(name: str, cluster: Cluster, scale: Asked, settings: str) -> tuple[Workload, tuple[str, ...], str]:
    """Returns the workload, what was changed for this cluster, and the settings that make it so."""
    if cluster.device is None:
        chosen, shrunk = resolve(name, scale, cluster, settings)
        data = data_folder(chosen, CACHE)
        if data.exists() or not isinstance(chosen, TranslationExperiment):
            return workload(chosen, data.resolve()), (shrunk,), settings
        longest = f"the text is not prepared yet: micro-batches are taken as rows of {chosen.text.max_tokens} tokens"
        return workload(chosen), (shrunk, longest), settings
    if scale == "laptop":
        chosen, shrunk = resolve(name, scale, cluster, settings)
        return workload(chosen), (shrunk,), settings
    work = workload(find(name).with_settings(settings))
    if "pipeline.replicas" in settings:
        return work, (), settings
    changed, notes = adapted(work, cluster)
    pipeline = changed.pipeline
    made = f" pipeline.replicas={pipeline.replicas} pipeline.micro_batches={pipeline.micro_batches}" if notes else ""
    return changed, notes, settings + made


def _quiet(text: str) -> None:
    """Says nothing: standard output is for the one object."""
