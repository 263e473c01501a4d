"""``make plan``: plans a run for this machine, a Ray cluster or a declared cluster, and prints the plan."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from experiments.base.cluster import Cluster, parse_cluster
from experiments.base.experiment import Experiment
from experiments.base.hints import option
from experiments.images.runs import find_amoebanet
from experiments.names import Scale
from experiments.planning.choose import limit_replicas_to_cluster
from experiments.planning.pipeline_settings import merged, split_pipeline_auto
from experiments.planning.report import lines_of, settings_of
from experiments.planning.request import noted_plans
from experiments.registry import find, resolve
from launch.backends.backend import Backend
from launch.backends.select import cluster_backend
from launch.planning.layer_costs import MeasuredCosts
from launch.runs.store import CACHE
from launch.terminal import Terminal
from launch.tracking.progress import log_when_long
from launch.worker.devices import this_machine, with_available_precision
from suite.errors import SettingError


def print_plan(name: str, cluster: str, scale: Scale, settings: str, form: str, best: bool, console: Console) -> None:
    """Prints the plan of an experiment or of ``amoebanet_<L>x<D>`` for the declared cluster, otherwise for that of
    RAY_ADDRESS, otherwise for this machine; with ``best`` the fastest plans of all K, R, M and schedules. With ``form``
    json, standard output has one JSON object, or a list of them, and nothing else.

    On a declared cluster an experiment has the paper's sizes unless a scale is given, and as many replicas as fit.
    Raises SettingError for invalid arguments, PlanError when the run does not fit.
    """
    settings, chooses = split_pipeline_auto(settings)
    best = best or chooses
    if find_amoebanet(name, 1) is not None and scale in ("laptop", "slice"):
        raise SettingError(
            f"{name} has no scale {scale}; its sizes are those of the paper, or set with {option('SET')}"
        )
    log = (Terminal(stderr=True) if form == "json" else console).print
    with closing(Backend() if cluster else cluster_backend()) as backend:
        devices = parse_cluster(cluster, this_machine()) if cluster else backend.cluster()
        with log_when_long(f"planning {name}", log) as set_part:
            work, settings_of_work, notes, data = _request(name, devices, scale, settings, best)
            find_costs = MeasuredCosts(CACHE / "costs", log, backend, data)
            plans = noted_plans(work, devices, find_costs, settings_of_work, (*devices.notes, *notes), best, set_part)
    if form == "json":
        records = [planned.as_dict() | {"settings": settings_of(planned, work)} for planned in plans]
        print(json.dumps(records if best else records[0], indent=1, allow_nan=False))
        return
    for line in plans[0].lines():
        console.print(line)
    if best:
        for line in lines_of(plans):
            console.print(line)
        chosen = f'"{merged(settings, settings_of(plans[0], work))}"'
        console.print(f"the settings of the first: {option('SET', chosen)}")


class _Request(NamedTuple):
    work: Experiment
    settings: str
    """The settings that give this workload."""
    notes: tuple[str, ...] = ()
    """What was changed for this cluster."""
    data: Path | None = None
    """Folder of its prepared data; None if there is none."""


def _request(name: str, cluster: Cluster, scale: Scale, settings: str, best: bool) -> _Request:
    amoebanet = find_amoebanet(name, cluster.devices)
    paper = (amoebanet or find(name)).with_settings(settings)
    paper.check_data()
    if amoebanet is not None:
        return _Request(paper, settings)
    if cluster.device is not None and scale not in ("laptop", "slice"):
        if best or "pipeline.replicas" in settings:
            return _Request(paper, settings)
        changed, notes = limit_replicas_to_cluster(paper, cluster)
        pipeline = changed.pipeline
        count = pipeline.micro_batches or "auto"
        added = f" pipeline.replicas={pipeline.replicas} pipeline.micro_batches={count}" if notes else ""
        return _Request(changed, settings + added, notes)
    chosen, scale_note = resolve(name, scale, cluster, settings, best)
    noted = [scale_note] if scale_note else []
    if cluster.device is not None:
        return _Request(chosen, settings, tuple(noted))
    chosen = with_available_precision(chosen, cluster, noted.append)
    data = chosen.data_folder(CACHE)
    if data.exists():
        return _Request(chosen.with_prepared(data.resolve()), settings, tuple(noted), data.resolve())
    if chosen.sample_note:
        noted.append(f"the data is not prepared yet: the plan assumes {chosen.sample_note}")
    return _Request(chosen, settings, tuple(noted))
