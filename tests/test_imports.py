"""Each package may import only packages further down ``ORDER``; ray and deepspeed have their own places."""

import ast
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

ORDER = [
    "launch/cli",
    "launch/entry",
    "launch/cli_options",
    "launch/jobs",
    "launch/tables",
    "launch/sweeps",
    "launch/diff",
    "launch/train",
    "launch/planning",
    "launch/diagnostics",
    "launch/inference",
    "launch/watching",
    "launch/backends",
    "launch/supervision",
    "launch/worker",
    "launch/tracking",
    "launch/node_probe",
    "launch/ray_nodes",
    "launch/catalog",
    "launch/error_log",
    "launch/runs",
    "launch/interrupts",
    "launch/terminal",
    "experiments/registry",
    "experiments/sweeps",
    "experiments/sweeps/report",
    "experiments/sweeps/members",
    "experiments/huggingface",
    "experiments/tables",
    "experiments/scaling",
    "experiments/planning",
    "experiments/custom",
    "experiments/images",
    "experiments/language_model",
    "experiments/translation",
    "experiments/report",
    "experiments/names",
    "experiments/base",
    "models",
    "suite/training/checkpoint",
    "suite/training",
    "suite/evaluation",
    "suite/data/images",
    "suite/data/documents",
    "suite/data/text",
    "suite/data",
    "suite/decoding",
    "suite/pipeline/planning",
    "suite/pipeline/runtime",
    "suite/pipeline/schedule",
    "suite/pipeline/model",
    "suite/exchange",
    "suite/settings",
    "suite/train_spec",
    "suite/paths",
    "suite/log",
    "suite/device",
    "suite/cgroups",
    "suite/errors",
]
"""Each package, and each file outside of one, above all that it may import."""

TOP = ("launch", "experiments", "models", "suite")

UPWARD = {"suite/__init__.py": {"launch"}}
"""``suite.load``, a public name for users, which looks up to the floor that knows runs."""

ALONE = {"ray": "launch/", "deepspeed": "suite/training/optimizer.py"}
"""Packages that only these places may import."""


@cache
def files():
    return [path for top in TOP for path in sorted((ROOT / top).rglob("*.py"))]


@cache
def imported(path):
    """Returns (line, dotted name) of each import, also of those inside functions, and the lines for types alone."""
    tree, found = ast.parse(path.read_text()), []
    for_types = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            found += [(node.lineno, f"{node.module}.{name.name}") for name in node.names]
        elif isinstance(node, ast.Import):
            found += [(node.lineno, name.name) for name in node.names]
    return found, {line for block in for_types for line in range(block.lineno, block.end_lineno + 1)}


@cache
def file_of(name):
    """Returns the file of a dotted name, which may end with a symbol; None for other packages' and for folders."""
    parts = name.split(".")
    candidates = (ROOT.joinpath(*part).with_suffix(".py") for part in (parts, parts[:-1]) if part)
    return next((path for path in candidates if path.exists()), None)


@cache
def package_of(name):
    """Returns the package of a dotted name, which may end with a symbol; all files of ``models`` are one package."""
    parts = name.split(".")
    while not ROOT.joinpath(*parts).with_suffix(".py").exists() and not ROOT.joinpath(*parts).is_dir():
        parts.pop()
    is_file = ROOT.joinpath(*parts).with_suffix(".py").exists()
    if is_file and (len(parts) > 2 or parts[0] == "models"):
        parts.pop()
    return "/".join(parts)


def test_every_package_has_its_place_in_the_order():
    paths = [path.relative_to(ROOT).with_suffix("") for path in files() if path.stem != "__init__"]
    packages = {package_of(".".join(path.parts)) for path in paths}
    assert packages == set(ORDER)
    assert len(ORDER) == len(set(ORDER))


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_run_down(path):
    package = package_of(".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"))
    imports, _ = imported(path)
    if package not in ORDER:
        assert path.stem == "__init__"
        above = TOP[: TOP.index(package.split("/")[0])]
        upward = {name.split(".")[0] for _, name in imports} & {*above}
        assert upward <= UPWARD.get(str(path.relative_to(ROOT)), set()), f"{path} imports {upward}"
        return
    for line, name in imports:
        if name.split(".")[0] in TOP and (target := package_of(name)) != package:
            assert ORDER.index(target) > ORDER.index(package), f"{path}:{line}: {package} imports {target}"


def test_everything_imported_from_here_exists():
    for path in files():
        for line, name in imported(path)[0]:
            if name.split(".")[0] in TOP and file_of(name) is None:
                assert ROOT.joinpath(*name.split(".")[:-1], "__init__.py").exists(), f"{path}:{line}: no {name}"


def test_no_files_import_each_other_in_a_circle():
    graph = {}
    for path in files():
        imports, for_types = imported(path)
        graph[path] = {file_of(name) for line, name in imports if line not in for_types} - {None}
    assert list(TopologicalSorter(graph).static_order())  # raises CycleError, which names the circle


@pytest.mark.parametrize("package", ALONE)
def test_ray_and_deepspeed_are_imported_in_their_own_places(package):
    users = [path for path in files() if any(name.split(".")[0] == package for _, name in imported(path)[0])]
    assert users
    assert all(str(path.relative_to(ROOT)).startswith(ALONE[package]) for path in users), users
