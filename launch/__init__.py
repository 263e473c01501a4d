"""Starts runs: the command line; ``run`` for your file or a test (docs/own-model.md); ``train_loop`` for Ray Train."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from suite.errors import SettingError, check_known

if TYPE_CHECKING:  # the command line imports this package
    from torch import nn

    from suite import TrainSpec


@dataclass(frozen=True)
class FinishedRun:
    """A run that has ended."""

    folder: Path
    record: dict[str, Any]
    """``record.json``: losses, held-out score, speed, memory."""

    def model(self, checkpoint: str | int | None = None) -> nn.Module:
        """Returns the trained model, as ``suite.load`` does."""
        from suite import load

        return load(self.folder, checkpoint)


def run(
    function: Callable[[], TrainSpec], settings: str = "", launcher: Literal["local", "ray"] = "local"
) -> FinishedRun:
    """Trains what a function of a file returns, as ``gpipe experiment file.py:function --set settings`` does.

    Call it below ``if __name__ == "__main__":``, because workers import the file. Raises a SuiteError for any error
    that the user can fix.
    """
    global _is_running
    from experiments.custom.own_imports import search_last

    source = _source_of(function)
    search_last(Path(source.rpartition(":")[0]).resolve().parent)  # Python puts a script's folder first

    from launch.terminal import Terminal
    from launch.train.command import start
    from suite.paths import read_json

    check_known("launcher", launcher, ("local", "ray"))
    if _is_running:  # by a call that imports the file: this one would never end
        raise SettingError('run is called while the file is imported; call it below if __name__ == "__main__":')
    _is_running = True
    try:
        folder = start(source, "auto", settings, launcher, Terminal())
    finally:
        _is_running = False
    return FinishedRun(folder.path, read_json(folder.record) or {})


_is_running = False


def train_loop(config: dict[str, Any]) -> None:
    """Trains in the processes of a ``ray.train.torch.TorchTrainer``, one for each of the K x R workers. The argument
    ``train_loop_config`` has the ``name`` of an experiment, or path.py:function with an absolute path, and if wanted
    ``settings`` ("train.steps=50") and ``scale``.

    The run's folder is in ``RunConfig(storage_path, name)``, which all nodes share. When Ray Train starts the processes
    again after a failure, they resume that run. At its end all report to Ray Train, rank 0 the numbers of its
    ``record.json``, its folder and its newest checkpoint. Raises a SuiteError for any error that the user can fix.
    """
    import ray.train

    os.environ["GPIPE_STORAGE"] = ray.train.get_context().get_storage().experiment_fs_path  # before the next import

    from launch.train.ray_train import train_loop

    train_loop(config)


def _source_of(function: Any) -> str:
    """Returns path.py:function or package.module:function. Raises SettingError for what workers cannot import."""
    name, module = getattr(function, "__qualname__", ""), sys.modules.get(getattr(function, "__module__", None) or "")
    if not name.isidentifier() or module is None:
        raise SettingError(f"{function!r} is no function of a file that workers can import; define it there with def")
    if "." in module.__name__:
        return f"{module.__name__}:{name}"
    if getattr(module, "__file__", None) is None:
        raise SettingError(f"{name} is defined in a shell or a notebook; write it into a file, which workers import")
    return f"{module.__file__}:{name}"
