"""Names of runs, and how a name becomes a resolved experiment."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from experiments import images, overrides, toml_text, translation
from experiments.cluster import Cluster
from experiments.experiment import Experiment
from experiments.image_experiment import ImageExperiment
from experiments.scale_choice import Asked, choose_scale
from experiments.text_experiment import TranslationExperiment
from suite.errors import SettingError, nearest

TASKS: dict[str, type[Experiment]] = {"translation": TranslationExperiment, "classification": ImageExperiment}


def experiments() -> dict[str, Callable[[], Experiment]]:
    """Returns every run by name, smallest first of each kind; each makes the experiment with its own numbers."""
    runs = (
        translation.t12_400m,
        translation.t24_1_3b_wide,
        translation.t48_1_3b_deep,
        translation.t64_3b,
        translation.t128_6b,
        images.amoebanet_fashion,
        images.amoebanet_imagenet,
    )
    return {run.__name__: run for run in runs}


def find(name: str) -> Experiment:
    """Returns a run with the paper's numbers. Raises SettingError with the nearest names to an unknown one."""
    known = experiments()
    if name not in known:
        raise SettingError(f"no experiment is called {name}; {nearest(name, known)}")
    return known[name]()


def read_experiment(text: str) -> Experiment:
    """Reads what ``Experiment.to_toml`` wrote, exactly. Raises SettingError when it is no TOML or no experiment."""
    values = toml_text.read(text)
    task = values.get("task")
    if task not in TASKS:
        raise SettingError(f"task is {task!r} in the experiment's file; it must be one of {', '.join(TASKS)}")
    return TASKS[task].restored(values)


def resolve(name: str, scale: Asked, cluster: Cluster, settings: str | Iterable[str] = ()) -> tuple[Experiment, str]:
    """Returns the run at a scale, settings applied, and one line saying what was shrunk and why.

    Raises SettingError for an unknown name or a bad setting, PlacementError when ``paper`` does not fit the cluster.
    """
    given = overrides.split(settings) if isinstance(settings, str) else settings
    return choose_scale(find(name), scale, cluster, given)
