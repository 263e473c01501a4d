"""Each package may import only packages further down ``ORDER``; ray and deepspeed have their own places."""

import ast
from graphlib import CycleError, TopologicalSorter
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

ALONE = {
    "ray": ("launch/",),
    "deepspeed": ("suite/training/optimizer.py",),
}
"""Packages that only these places may import."""


def files():
    return [path for top in TOP for path in sorted((ROOT / top).rglob("*.py"))]


def imported(path, types=True):
    """Yields (line, dotted name) of each import, also those inside functions, and those for types alone if asked."""
    tree = ast.parse(path.read_text())
    for_types = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    left_out = set() if types else {id(node) for block in for_types for node in ast.walk(block)}
    for node in ast.walk(tree):
        if id(node) in left_out:
            continue
        if isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f"{node.module}.{name.name}") for name in node.names)
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, name.name) for name in node.names)


def file_of(name):
    """Returns the file of a dotted name, which may end with a symbol; None for other packages' and for folders."""
    parts = name.split(".")
    candidates = (ROOT.joinpath(*part).with_suffix(".py") for part in (parts, parts[:-1]) if part)
    return next((path for path in candidates if path.exists()), None)


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
    if package not in ORDER:
        assert path.stem == "__init__"
        above = TOP[: TOP.index(package.split("/")[0])]
        upward = {name.split(".")[0] for _, name in imported(path)} & {*above}
        assert upward <= UPWARD.get(str(path.relative_to(ROOT)), set()), f"{path} imports {upward}"
        return
    for line, name in imported(path):
        if name.split(".")[0] in TOP and (target := package_of(name)) != package:
            assert ORDER.index(target) > ORDER.index(package), f"{path}:{line}: {package} imports {target}"


def test_everything_imported_from_here_exists():
    for path in files():
        for line, name in imported(path):
            if name.split(".")[0] in TOP and file_of(name) is None:
                assert ROOT.joinpath(*name.split(".")[:-1], "__init__.py").exists(), f"{path}:{line}: no {name}"


def test_no_files_import_each_other_in_a_circle():
    graph = {path: {file_of(name) for _, name in imported(path, types=False)} - {None} for path in files()}
    assert list(TopologicalSorter(graph).static_order())  # raises CycleError, which names the circle


@pytest.mark.parametrize("package", ALONE)
def test_ray_and_deepspeed_are_imported_in_their_own_places(package):
    places = {
        str(path.relative_to(ROOT)) for path in files() for _, name in imported(path) if name.split(".")[0] == package
    }
    assert places
    assert all(place.startswith(ALONE[package]) for place in places), places


def test_an_arrow_that_runs_up_is_seen(tmp_path, monkeypatch):
    """The rule of packages, on two packages."""
    (tmp_path / "suite/settings.py").parent.mkdir()
    (tmp_path / "suite/settings.py").write_text("def read():\n    from suite.paths import join\n")
    (tmp_path / "suite/paths.py").write_text("from suite.settings import read\n")
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    test_imports_run_down(tmp_path / "suite/settings.py")
    with pytest.raises(AssertionError, match="suite/paths imports suite/settings"):
        test_imports_run_down(tmp_path / "suite/paths.py")


def test_a_circle_through_a_function_is_seen(tmp_path, monkeypatch):
    (tmp_path / "suite").mkdir()
    (tmp_path / "suite/a.py").write_text("def read():\n    from suite.b import write\n")
    (tmp_path / "suite/b.py").write_text("from suite.a import read\n")
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    with pytest.raises(CycleError):
        test_no_files_import_each_other_in_a_circle()
    (tmp_path / "suite/a.py").write_text("if TYPE_CHECKING:\n    from suite.b import write\n")
    test_no_files_import_each_other_in_a_circle()
