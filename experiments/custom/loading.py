"""Finds the function that ``NAME=path.py:function`` or ``NAME=package.module:function`` names, and calls it."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import multiprocessing
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import fields, replace
from functools import lru_cache
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, cast

import torch

from experiments.custom.held_tensors import check_held
from experiments.custom.own_imports import ROOT, check_names, imported_files, package_names, search_last
from experiments.custom.spec_check import check_functions, layers_of
from suite.errors import SettingError, SuiteError, nearest, typed_line
from suite.pipeline.model import rng
from suite.train_spec import TrainSpec


class Source(NamedTuple):
    """The parts of ``place:function`` or ``place:function[label]``."""

    place: str
    function: str
    label: str
    """What a function of a worker's hook is given; empty otherwise."""

    @staticmethod
    def parse(name: str) -> Source:
        """Raises SettingError for a text that names no function."""
        found = re.fullmatch(r"(.+?):([^\W\d]\w*)(?:\[(.+)\])?", name)
        if found is None:
            raise SettingError(f"{name!r} names no function; write path.py:function, such as my_run.py:digits")
        place, function, label = found.groups(default="")
        return Source(place, function, label)

    def __str__(self) -> str:
        return f"{self.place}:{self.function}" + (f"[{self.label}]" if self.label else "")


def absolute(name: str) -> str:
    """Returns the source with its file's full path, because workers may have another working directory; below ``ROOT``
    the path from there, which is the same on all nodes of a job.

    Raises SettingError for a text without a function, and for a file that does not exist.
    """
    source = Source.parse(name)
    if not _is_file(source.place):
        return name
    path = Path(source.place).expanduser()
    if not path.is_file():
        raise SettingError(f"there is no file {path}, looked for {source.function} in it; give path.py:function")
    path = path.resolve()
    return str(source._replace(place=str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)))


def seeded(*values: int) -> AbstractContextManager[None]:
    """A context in which torch, numpy and ``random`` draw the same numbers in every process.

    Use it only in the main thread: layers draw from the same generators.
    """
    return rng.seeded(rng.mix(5, *values), torch.device("cpu"))


@lru_cache(maxsize=4)
def load_spec(source: str, seed: int) -> TrainSpec:
    """Returns ``made_spec``, of each function and seed once. Raises SettingError as it does, and as ``check_held``."""
    spec = made_spec(source, seed)
    check_held(spec)
    return spec


def made_spec(source: str, seed: int) -> TrainSpec:
    """Calls the function and returns what it makes; its layers have the random initial values of ``seed``.

    Raises SettingError for a function that does not exist, fails, or returns anything else than a TrainSpec with
    layers.
    """
    place, name, label = Source.parse(source)
    if label:
        raise SettingError(f"{source!r} names no function; write path.py:function, such as my_run.py:digits")
    with seeded(seed), torch.enable_grad():  # an import may draw too, and is done once
        function = find_function(place, name)
    with seeded(seed), torch.enable_grad():  # restores what the user's code may switch off
        spec = called(function, place, source)
    if not isinstance(spec, TrainSpec):
        raise SettingError(
            f"{source} returned an object of type {type(spec).__name__}; it must return a suite.TrainSpec"
        )
    check_functions(spec)
    return replace(spec, layers=layers_of(spec))


def called(function: Callable[[], Any], place: str, source: str) -> Any:
    """Calls a function of the file ``place``. Raises SettingError with ``source`` and the line when it fails."""
    try:
        return function()
    except SuiteError:
        raise
    except (Exception, SystemExit) as error:
        raise SettingError(f"{source} failed{_line_of(error, place)}: {_described(error)}") from error


def digest(source: str) -> str:
    """Returns the SHA-256 of the file with the function, and of those of its folder, or packages, that it imports."""
    place = Source.parse(source).place
    file = Path(inspect.getsourcefile(_module(place)) or "")
    folder = file.parent if _is_file(place) else file.parents[len(package_names(file.parent))]
    return hashlib.sha256(b"".join(path.read_bytes() for path in imported_files(file, folder))).hexdigest()


def description(source: str) -> str:
    """Returns the first line of the function's docstring."""
    place, name, _ = Source.parse(source)
    return (find_function(place, name).__doc__ or "").strip().split("\n")[0]


def _is_file(place: str) -> bool:
    return place.endswith(".py") or "/" in place


def _check_outside_runs(place: str) -> None:
    """Raises SettingError for code in a run's folder: the folder may come from another machine, with its settings."""
    for path in [ROOT / place] if _is_file(place) else _paths_of_module(place):
        for folder in (path.resolve(), *path.resolve().parents):
            if (folder / "experiment.toml").exists():
                raise SettingError(
                    f"{place} is in the run folder {folder}, and code in run folders is never executed, because they "
                    "may come from another machine; copy it elsewhere and start a new run of it"
                )


def _paths_of_module(name: str) -> Iterator[Path]:
    """Yields the files and folders that an import of a module would execute or search; imports nothing."""
    search = None
    for part in name.split("."):
        found = PathFinder.find_spec(part, search)
        if found is None:
            return
        search = list(found.submodule_search_locations or ())
        yield from map(Path, [*([found.origin] if found.origin else []), *search])


@lru_cache(maxsize=16)
def _module(place: str) -> ModuleType:
    """Imports a file, which may import what is in its own folder, or a module, also one of the current folder."""
    path = ROOT / place
    folder, file = (path.parent, path) if _is_file(place) else (Path.cwd(), None)
    search_last(folder)
    _check_outside_runs(place)
    if file is not None and not file.is_file():
        raise SettingError(f"{file} is gone, and it has the function; put it back")
    check_names(folder, file, () if file else (place,))
    try:
        if file is None:
            return importlib.import_module(place)
        name = f"{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"  # other files have the same stem
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # for pickle and dataclasses, which look a class's module up
        spec.loader.exec_module(module)
        if multiprocessing.get_start_method(allow_none=True) is None:
            multiprocessing.set_start_method("fork")  # other processes could not import the module by its name
    except (Exception, SystemExit) as error:
        raise SettingError(f"{place} cannot be imported{_line_of(error, place)}: {_described(error)}") from error
    return module


def find_function(place: str, name: str) -> Callable[..., Any]:
    """Returns a function of a file or a module. Raises SettingError where there is none."""
    module = _module(place)
    function = getattr(module, name, None)
    if callable(function):
        return cast(Callable[..., Any], function)
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
    said = typed_line(error)
    if "TrainSpec.__init__()" in said:
        said += f"; its fields are {', '.join(field.name for field in fields(TrainSpec))}"
    return said
