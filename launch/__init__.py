"""Starts runs: the command line, and ``run`` for your own file or a test (docs/own-model.md)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from suite.errors import SettingError, nearest

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

    launchers = ("local", "ray")
    if launcher not in launchers:
        raise SettingError(f"unknown launcher {launcher!r}; {nearest(launcher, launchers)}")
    if _is_running:  # by a call that imports the file: this one would never end
        raise SettingError('run is called while the file is imported; call it below if __name__ == "__main__":')
    _is_running = True
    try:
        folder = start(source, "auto", settings, launcher, Terminal())
    finally:
        _is_running = False
    return FinishedRun(folder.path, read_json(folder.record) or {})


_is_running = False


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
