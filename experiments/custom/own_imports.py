"""Imports of a user's file: its folder is searched last, so that nothing in it hides a package of the environment."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path

from suite.errors import SettingError

ROOT = Path(__file__).resolve().parents[2]
"""The folder that this code runs from: a checkout, or a job's copy of it on any node."""


def search_last(folder: Path) -> None:
    """Makes ``folder`` the last one in which Python looks for modules; Python itself puts a script's folder first."""
    if folder == ROOT:  # a checkout, or a job's copy of it, must not give way to another installation
        return
    sys.path[:] = [*(place for place in sys.path if Path(place or ".").resolve() != folder), str(folder)]


def check_names(folder: Path, file: Path | None, names: tuple[str, ...] = ()) -> None:
    """Checks modules ``names`` and what ``file`` imports, and what those of them in ``folder`` import themselves.

    Raises SettingError for a module that is both in the folder and in the environment.
    """
    for importer, name, path in _own_imports(folder, file, names):
        top = name.partition(".")[0]
        if _is_elsewhere(top, folder):
            raise SettingError(
                f"{importer} imports {top}, and this name has both {path} and a module of the suite's environment; "
                f"rename {path.relative_to(folder).parts[0]}"
            )


def imported_files(file: Path, folder: Path | None = None) -> list[Path]:
    """Returns a file and those of its folder, or of ``folder``, that it imports, also through one another, sorted."""
    return sorted({file, *(path for _, _, path in _own_imports(folder or file.parent, file, ()))})


def _own_imports(folder: Path, file: Path | None, names: tuple[str, ...]) -> Iterator[tuple[str, str, Path]]:
    """Yields (importer, dotted name, file of the folder that an import of the name executes), each file once; of a
    checkout none of the suite's own."""
    waiting = [(str(file or folder), name) for name in (*names, *(_imported(file) if file else ()))]
    skipped = ("suite", "models", "experiments", "launch") if folder == ROOT else ()
    followed = set[Path]()
    while waiting:
        importer, name = waiting.pop()
        if name.partition(".")[0] in skipped:
            continue
        for path in _own_files(folder, name):
            if path not in followed:
                followed.add(path)
                yield importer, name, path
                waiting += [(str(path), other) for other in sorted({*_imported(path)})]


def _imported(file: Path) -> Iterator[str]:
    """Yields the dotted names that a file may import; a relative one as seen from its top package."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # its import says what is wrong
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = package_names(file.parents[node.level - 1]) if node.level else []
            if package or not node.level:  # otherwise the import itself fails
                parts = [*package, *([node.module] if node.module else [])]
                yield from (".".join([*parts, name.name]) for name in node.names)


def package_names(folder: Path) -> list[str]:
    """Returns the names of the packages that a folder is in, the topmost first."""
    names: list[str] = []
    while (folder / "__init__.py").is_file():
        names.insert(0, folder.name)
        folder = folder.parent
    return names


def _own_files(folder: Path, name: str) -> Iterator[Path]:
    """Yields the files of ``folder`` that an import of a dotted name would execute."""
    path = folder
    for part in name.split("."):
        path /= part
        yield from filter(Path.is_file, (path.with_name(f"{part}.py"), path / "__init__.py"))


def _is_elsewhere(name: str, folder: Path) -> bool:
    places = [place for place in (*sys.path, str(ROOT)) if Path(place or ".").resolve() != folder]
    found = PathFinder.find_spec(name, places)
    return name in sys.stdlib_module_names or (found is not None and found.origin is not None)  # None: a mere folder
