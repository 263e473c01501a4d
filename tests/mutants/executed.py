"""Which test executes which statement: a copy of the repository in which each statement that can be changed first marks
a byte of a file that all processes share, also those that are killed. Which bytes are marked is read after each test.

A test that never executes a statement cannot find a fault in it. What a file does while it is imported, and what a
fixture of a module does, counts for all tests that use it.
"""

import ast
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

MARKS = "_mutants_marks"
"""The module with the bytes, in the root of the copy."""

MODULE = """
import mmap
with open({path!r}, "r+b") as file:
    MARKS = mmap.mmap(file.fileno(), 0)
"""

HEADER = f"""
try:
    from {MARKS} import MARKS as {MARKS}
except ImportError:  # in a part of the repository that a test has copied
    {MARKS} = bytearray({{size}})
"""

Statement = tuple[str, int]
"""A file and a line."""


class Executed(NamedTuple):
    """What the tests execute."""

    tests: dict[str, set[Statement]]
    """The statements of each test that passes."""
    seconds: dict[str, float]
    failing: list[str]
    """Tests that fail without a fault, and are not asked."""


class Record:
    """What the tests execute, in a file: the commit and all statements, then a line for each file of tests."""

    def __init__(self, path: Path, commit: str, statements: list[Statement]) -> None:
        self._path, first = path, {"commit": commit, "statements": statements}
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        if not lines or lines[0] != json.loads(json.dumps(first)):
            lines = [first]
            path.write_text(json.dumps(first) + "\n")
        self._statements, self._lines = statements, lines[1:]

    @property
    def files(self) -> set[str]:
        return {line["file"] for line in self._lines}

    def add(self, name: str, known: Executed) -> None:
        number = {statement: at for at, statement in enumerate(self._statements)}
        tests = {name: sorted(map(number.__getitem__, several)) for name, several in known.tests.items()}
        self._lines.append({"file": name, "tests": tests, "seconds": known.seconds, "failing": known.failing})
        with self._path.open("a") as file:
            print(json.dumps(self._lines[-1]), file=file)

    def read(self) -> Executed:
        """Returns what the tests of all files execute."""
        known = Executed({}, {}, [])
        for line in self._lines:
            known.tests.update(
                {name: {self._statements[at] for at in several} for name, several in line["tests"].items()}
            )
            known.seconds.update(line["seconds"])
            known.failing.extend(line["failing"])
        return known


def mark_statements(root: Path, statements: list[Statement], marks: Path) -> dict[Path, bytes]:
    """Returns the marked sources of the files in ``statements``; writes the module and the empty file of marks."""
    marks.write_bytes(bytes(len(statements)))
    (root / f"{MARKS}.py").write_text(MODULE.format(path=str(marks)))
    sources = {}
    for file in {file for file, _ in statements}:
        lines = {line: at for at, (name, line) in enumerate(statements) if name == file}
        tree = _Marker(lines).visit(ast.parse((root / file).read_text()))
        tree.body[_after_future(tree) : _after_future(tree)] = ast.parse(HEADER.format(size=len(statements))).body
        sources[root / file] = ast.unparse(ast.fix_missing_locations(tree)).encode()
    return sources


def _after_future(tree: ast.Module) -> int:
    """Returns where the first statement may stand: after the docstring and the imports from ``__future__``."""
    last = 0
    for at, node in enumerate(tree.body):
        is_docstring = at == 0 and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_docstring or (isinstance(node, ast.ImportFrom) and node.module == "__future__"):
            last = at + 1
    return last


class _Marker(ast.NodeTransformer):
    """Puts a mark before each statement that begins in one of the lines."""

    def __init__(self, lines: dict[int, int]) -> None:
        self._lines = lines

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list):
                setattr(node, name, [new for old in block for new in (*self._marks(old), old)])
        return node

    def _marks(self, statement: ast.stmt) -> Iterable[ast.stmt]:
        if (at := self._lines.get(statement.lineno)) is not None:
            yield ast.parse(f"{MARKS}[{at}] = 1").body[0]


def while_imported(tree: ast.Module) -> set[int]:
    """Returns the first lines of the statements that are executed when the file is imported."""
    lines, blocks = set[int](), [tree.body]
    while blocks:
        for node in blocks.pop():
            lines.add(node.lineno)
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                blocks += [
                    value
                    for _, value in ast.iter_fields(node)
                    if isinstance(value, list) and value and isinstance(value[0], ast.stmt)
                ]
    return lines


def of_file(file: str, answer: Any, statements: list[Statement], imported: set[Statement]) -> Executed:
    """Returns what the tests of one file have executed, from the answer of ``warm.py``."""
    tests: dict[str, set[Statement]] = {}
    seconds, failing, common = {}, set[str](), set[Statement]()
    for kind, *event in answer["events"]:
        if kind == "imports":
            common |= {statements[at] for at in event[0]}
        elif kind in ("done", "shared"):
            tests.setdefault(event[0], set()).update(statements[at] for at in event[-1])
            if kind == "done":
                seconds[event[0]] = event[1]
        elif kind in ("failed", "broken"):
            failing.add(event[0])
    if answer["ended"] not in ("exit 0", "exit 1", "exit 5"):  # 5: all are slow
        failing.add(f"{file}: {answer['ended']}")
    common |= imported.intersection(*[set[Statement]().union(*tests.values())])
    passed = {name: several | common for name, several in tests.items() if name in seconds and name not in failing}
    return Executed(passed, seconds, sorted(failing))
