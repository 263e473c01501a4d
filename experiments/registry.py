"""The named runs, and their resolution to an experiment."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from experiments import custom, images, language_model, translation
from experiments.base import overrides
from experiments.base.cluster import Cluster
from experiments.base.experiment import FORMAT, Experiment
from experiments.custom.experiment import find_custom
from experiments.language_model.runs import find_transformer
from experiments.names import ENTRY_POINTS, Scale, check_experiment, is_source
from experiments.scaling.scale_choice import choose_scale
from suite.errors import RunFileError, SettingError
from suite.paths import read_text

TASK_FOLDERS = (translation, language_model, images, custom)
"""One for each task. Its ``EXPERIMENT`` is the class of its runs, ``RUNS`` are functions that make the named ones."""

TASKS: dict[str, type[Experiment]] = {
    str(folder.EXPERIMENT.model_fields["task"].default): folder.EXPERIMENT for folder in TASK_FOLDERS
}


def experiments() -> dict[str, Callable[[], Experiment]]:
    """Returns a function for every run by name, smallest first of each kind; it makes the experiment.

    Other packages' runs come last: entry points of the group ``gpipe.experiments``, functions that return a TrainSpec.
    """
    installed = {
        entry.name: partial(find_custom, entry.value, entry.name) for entry in entry_points(group=ENTRY_POINTS)
    }
    own: dict[str, Callable[[], Experiment]] = {run.__name__: run for folder in TASK_FOLDERS for run in folder.RUNS}
    return own | {name: make for name, make in installed.items() if name not in own}


def find(name: str) -> Experiment:
    """Returns a run with the paper's numbers, at any depth for ``transformer_<L>``, or the one that
    ``path.py:function`` defines.

    Raises SettingError with the closest names for an unknown name.
    """
    if is_source(name):
        return find_custom(name)
    if (transformer := find_transformer(name)) is not None:
        return transformer
    check_experiment(name)
    return experiments()[name]()


def read_settings(path: Path) -> dict[str, Any]:
    """Returns what an ``experiment.toml`` says. Raises RunFileError for a damaged file and without one."""
    advice = "restore it from a copy, or start a new run"
    text = read_text(path, advice)
    if text is None:
        raise RunFileError(f"there is no {path}; {advice}")
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as fault:
        raise RunFileError(f"{path} is damaged: it is not valid TOML ({fault}); {advice}") from None


def read_experiment_file(path: Path) -> Experiment:
    """Reads an ``experiment.toml``. Raises RunFileError for a damaged file, SettingError when it is no experiment."""
    values = read_settings(path)
    written, task = values.pop("format", 1), values.get("task")
    if written != FORMAT:
        raise SettingError(
            f"{path}: this run was written by another version of the suite: its experiment has format {written}, this "
            f"version reads format {FORMAT}; resume it with the version that wrote it, or start a new run"
        )
    if not isinstance(task, str) or task not in TASKS:
        raise SettingError(f"{path}: task is {task!r} in the experiment's file; it must be one of {', '.join(TASKS)}")
    try:
        return TASKS[task].restored(values)
    except SettingError as error:
        raise SettingError(f"{path}: {error}") from None


def resolve(
    name: str, scale: Scale, cluster: Cluster, settings: str | Iterable[str] = (), pipeline_auto: bool = False
) -> tuple[Experiment, str]:
    """Returns the run at a scale with settings applied, and one line that says what was shrunk and why. With
    ``pipeline_auto`` its plan may choose K, R and M.

    Raises SettingError for an unknown name or a bad setting, PlacementError when ``paper`` does not fit the cluster.
    """
    given = overrides.split(settings) if isinstance(settings, str) else settings
    return choose_scale(find(name), scale, cluster, given, pipeline_auto)
