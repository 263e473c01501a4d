"""Sweeps of your own: ``gpipe sweep path.py:function``, and entry points of the group ``gpipe.sweeps``."""

from __future__ import annotations

from contextlib import suppress
from importlib.metadata import entry_points
from pathlib import Path
from typing import cast

from experiments.base.cluster import Cluster
from experiments.base.experiment import Experiment
from experiments.base.overrides import split
from experiments.custom.experiment import find_custom
from experiments.custom.loading import Source, absolute, description, is_source, label_folder, load_sweep
from experiments.registry import find
from experiments.scaling.scale_choice import RequestedScale, choose_scale
from experiments.sweeps.members.base import Member, Report, Sweep, folder_name
from experiments.sweeps.registry import SWEEPS
from experiments.sweeps.report.by_label import label_report
from suite.errors import SettingError, SuiteError, nearest
from suite.sweep_spec import SweepRun, SweepSpec

ENTRY_POINTS = "gpipe.sweeps"


def installed_sweeps() -> dict[str, str]:
    """Returns the sources of the sweeps of other packages by name. The suite's own keep their names."""
    return {entry.name: entry.value for entry in entry_points(group=ENTRY_POINTS) if entry.name not in SWEEPS}


def find_sweep(name: str) -> Sweep:
    """Returns a sweep by its name, or the one that ``path.py:function`` defines.

    Raises SettingError with the closest names for an unknown name, and as ``load_sweep`` does.
    """
    if name in SWEEPS:
        return SWEEPS[name]
    installed = installed_sweeps()
    if name in installed:
        return custom_sweep(installed[name], name)
    if is_source(name):
        return custom_sweep(name)
    if name.endswith(".py"):
        raise SettingError(f"{name} is a file; name the function in it: {name}:function")
    raise SettingError(f"there is no sweep {name!r}; {nearest(name, [*SWEEPS, *installed])}")


def custom_sweep(source: str, name: str = "") -> Sweep:
    """Returns the sweep of a function, whose name is the sweep's unless given. Raises SettingError as ``load_sweep``
    does, and for a function with the name of one of the suite's sweeps."""
    source = absolute(source)
    name = name or Source.parse(source).function
    if name in SWEEPS:
        raise SettingError(f"the suite has a sweep {name}, and both would have one folder; rename the function")
    spec = load_sweep(source)

    def members(scale: str, cluster: Cluster, runs: Path) -> list[Member]:
        """Orders the runs by seed, so that an interrupted sweep has runs to compare. Raises SettingError that names the
        run for an unknown experiment or a bad setting."""
        found, place = [], folder_name(name, scale)
        for seed in range(spec.seeds):
            for run in spec.runs:
                try:
                    experiment = _experiment(source, run, seed, scale, cluster)
                except SuiteError as error:
                    raise SettingError(f"run {run.label!r} of the sweep {name}: {error}") from error
                found.append(Member(f"{place}/{label_folder(run.label)}-{seed}", run.label, experiment))
        return found

    def report(scale: str, cluster: Cluster, runs: Path) -> Report:
        title = f"{name}, scale {scale}" if scale else name
        about = [description(source), f"Runs of {source}; those of one label differ only in their seed."]
        return label_report(title, [sentence for sentence in about if sentence], members(scale, cluster, runs), runs)

    return Sweep(name, members, report, _scales(spec))


def _scales(spec: SweepSpec) -> tuple[str, ...]:
    """Returns those of a run, if one of the sweep's is a named run of the paper."""
    scales = set()
    for run in spec.runs:
        with suppress(SuiteError):  # members() reports a name that is unknown
            if isinstance(run.run, str):
                scales.add(find(run.run).scale)
    return ("laptop", "paper") if "paper" in scales else ()


def _experiment(source: str, run: SweepRun, seed: int, scale: str, cluster: Cluster) -> Experiment:
    found = find(run.run) if isinstance(run.run, str) else _own(source, run)
    settings = split(run.settings)
    if any(setting.partition("=")[0].strip() == "train.seed" for setting in settings):
        raise SettingError("train.seed is the sweep's to set; give the number of seeds as seeds=")
    requested = cast(RequestedScale, scale or "auto")
    return choose_scale(found, requested, cluster, [*settings, f"train.seed={seed}"])[0]


def _own(source: str, run: SweepRun) -> Experiment:
    function = getattr(run.run, "func", run.run)  # of a functools.partial
    name = getattr(function, "__name__", "")
    return find_custom(f"{source}[{run.label}]", name if name.isidentifier() else label_folder(run.label))
