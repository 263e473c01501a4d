"""The code does not grow: each room has a budget of lines, and files, functions and docs have limits.

A budget is lowered when its room has shrunk by more than a tenth. It is raised only by a change whose purpose says so.
"""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

BUDGETS = {
    "launch": 1314,
    "launch/backends": 1739,
    "launch/diagnostics": 784,
    "launch/diff": 950,
    "launch/inference": 1162,
    "launch/jobs": 659,
    "launch/planning": 495,
    "launch/runs": 506,
    "launch/supervision": 736,
    "launch/sweeps": 598,
    "launch/tracking": 549,
    "launch/train": 753,
    "launch/watching": 950,
    "launch/worker": 1917,
    "experiments": 156,
    "experiments/base": 1149,
    "experiments/custom": 1955,
    "experiments/huggingface": 410,
    "experiments/images": 274,
    "experiments/language_model": 222,
    "experiments/planning": 1369,
    "experiments/report": 284,
    "experiments/scaling": 131,
    "experiments/sweeps": 1995,
    "experiments/tables": 604,
    "experiments/translation": 450,
    "models": 1348,
    "suite": 909,
    "suite/data": 3577,
    "suite/decoding": 477,
    "suite/evaluation": 292,
    "suite/pipeline/model": 1176,
    "suite/pipeline/planning": 3466,
    "suite/pipeline/runtime": 2509,
    "suite/pipeline/schedule": 1478,
    "suite/training": 4109,
}
"""Physical lines of all Python files below a folder that have no budget of their own."""

TOP = ("launch", "experiments", "models", "suite")
MOST_LINES_OF_A_FILE, MOST_LINES_OF_A_FUNCTION, MOST_FILES = 350, 60, 20

MOST_UNFORMATTED = 40

MOST_WORDS = {"README.md": 900}
MOST_WORDS_OF_DOCS = 17_000

MOST_LINES_OF_TESTS = 45_043


def files() -> list[Path]:
    return [path for top in TOP for path in sorted((ROOT / top).rglob("*.py"))]


def files_of_tests() -> list[Path]:
    return sorted((ROOT / "tests").rglob("*.py"))


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def lines(path: Path) -> int:
    return path.read_text().count("\n")


def room_of(path: Path) -> str:
    """Returns the deepest folder with a budget that holds a file."""
    return next(folder for parent in path.parents if (folder := name(parent)) in BUDGETS)


def test_each_room_keeps_its_budget_and_each_budget_follows_the_code_down() -> None:
    counts = dict.fromkeys(BUDGETS, 0)
    for path in files():
        counts[room_of(path)] += lines(path)
    assert not {room: (counts[room], most) for room, most in BUDGETS.items() if counts[room] > most}, "above the budget"
    assert not {room: (counts[room], most) for room, most in BUDGETS.items() if most > 1.1 * counts[room]}, "lower it"


def test_a_file_is_short() -> None:
    assert not [name(path) for path in (*files(), *files_of_tests()) if lines(path) > MOST_LINES_OF_A_FILE]


def test_the_tests_do_not_grow() -> None:
    assert sum(map(lines, files_of_tests())) <= MOST_LINES_OF_TESTS


def test_a_function_fits_a_screen() -> None:
    for path in files():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                height = node.end_lineno - node.lineno + 1
                assert height <= MOST_LINES_OF_A_FUNCTION, f"{name(path)}: {node.name} has {height} lines"


def test_a_folder_has_few_files() -> None:
    for folder in {path.parent for path in files()}:
        assert len(list(folder.glob("*.py"))) <= MOST_FILES, name(folder)


def test_the_formatter_formats_nearly_everything() -> None:
    assert sum(path.read_text().count("# fmt: skip") for path in files()) <= MOST_UNFORMATTED


@pytest.mark.parametrize("page", MOST_WORDS)
def test_a_page_is_short(page: str) -> None:
    assert len((ROOT / page).read_text().split()) <= MOST_WORDS[page]


def test_the_docs_are_short() -> None:
    assert sum(len(page.read_text().split()) for page in (ROOT / "docs").glob("*.md")) <= MOST_WORDS_OF_DOCS
