"""Finds the function that ``NAME=path.py:function`` or ``NAME=package.module:function`` names, and calls it."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from experiments.custom.seeding import seeded
from suite.errors import SettingError, SuiteError, first_line, nearest
from suite.train_spec import TrainSpec


def is_source(name: str) -> bool:
    """Whether a name stands for a function of a file or of a module, as no name of the registry does."""
    return ":" in name


ROOT = Path(__file__).resolve().parents[2]
"""The folder that this code runs from: a checkout, or a job's copy of it on any node."""


def absolute(name: str) -> str:
    """Returns the source with its file's full path, because workers may have another working directory; below ``ROOT``
    the path from there, which is the same on all nodes of a job.

    Raises SettingError for a text without a function, and for a file that does not exist.
    """
    place, _, function = name.rpartition(":")
    if not place or not function.isidentifier():
        raise SettingError(f"{name!r} names no function; write path.py:function, such as my_run.py:digits")
    if not _is_file(place):
        return name
    path = Path(place).expanduser()
    if not path.is_file():
        raise SettingError(f"there is no file {place}, looked for {function} in it; NAME= takes path.py:function")
    path = path.resolve()
    return f"{path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}:{function}"


@lru_cache(maxsize=4)
def load_spec(source: str, seed: int) -> TrainSpec:
    """Returns what the function makes; its layers have the random initial values of ``seed``.

    Raises SettingError for a function that does not exist, fails, or returns anything else than a TrainSpec.
    """
    place, _, name = source.rpartition(":")
    with seeded(seed):
        function = _function(_module(place), place, name)
        try:
            spec = function()
        except SuiteError:
            raise
        except (Exception, SystemExit) as error:
            raise SettingError(f"{source} failed{_line_of(error, place)}: {_described(error)}") from error
    if not isinstance(spec, TrainSpec):
        raise SettingError(f"{source} returned a {type(spec).__name__}; it must return a suite.TrainSpec")
    return spec


def digest(source: str) -> str:
    """Returns the SHA-256 of the file with the function."""
    file = inspect.getsourcefile(_module(source.rpartition(":")[0]))
    assert file is not None
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


def description(source: str) -> str:
    """Returns the first line of the function's docstring."""
    place, _, name = source.rpartition(":")
    return (_function(_module(place), place, name).__doc__ or "").strip().split("\n")[0]


def _is_file(place: str) -> bool:
    return place.endswith(".py") or "/" in place


@lru_cache(maxsize=16)
def _module(place: str) -> ModuleType:
    """Imports a file or a module. A file's own folder is searched first for what it imports, as by ``python file``."""
    try:
        if not _is_file(place):
            sys.path.append("")  # the current folder, as for ``python -m``
            return importlib.import_module(place)
        path = ROOT / place
        if str(path.parent) not in sys.path:
            sys.path.insert(0, str(path.parent))
        name = f"{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"  # other files have the same stem
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # for pickle and dataclasses, which look a class's module up
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise SettingError(f"{place} cannot be imported{_line_of(error, place)}: {_described(error)}") from error
    return module


def _function(module: ModuleType, place: str, name: str) -> Callable[[], Any]:
    function = getattr(module, name, None)
    if callable(function):
        result: Callable[[], Any] = function
        return result
    own = [
        key
        for key, value in vars(module).items()
        if callable(value) and not isinstance(value, type) and getattr(value, "__module__", "") == module.__name__
    ]
    hint = nearest(name, own) if own else "it has no functions"
    raise SettingError(f"there is no function {name} in {place}; {hint}")


def _line_of(error: BaseException, place: str) -> str:
    """Returns where in the user's file an exception was raised."""
    file = str(ROOT / place)
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    if isinstance(error, SyntaxError):
        lines.append(error.lineno)
    return f" at line {lines[-1]}" if lines else ""


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {first_line(error)}"
