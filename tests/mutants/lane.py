"""A copy of the repository, and the process that runs tests in it."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FIRST_CHANGE_S = 1_000_000_000
"""Time of the files that are not changed. A changed file has a later one, in whole seconds: Python takes compiled code
for current when time and size are equal."""


class Lane:
    """A context, in which the process runs. One test run at a time."""

    def __init__(self, root: Path, commit: str, folder: Path) -> None:
        self.tree, self.temporary = folder / "tree", folder / "t"
        self._log = folder / "log.txt"
        self.temporary.mkdir(parents=True)
        git = ["git", "-c", "advice.detachedHead=false"]
        subprocess.run([*git, "clone", "-q", "--shared", "--no-checkout", root, self.tree], check=True)
        subprocess.run([*git, "-C", self.tree, "checkout", "-q", commit], check=True)
        if (root / ".venv").exists():
            (self.tree / ".venv").symlink_to(root / ".venv")
        for path in self.tree.rglob("*.py"):
            if ".venv" not in path.parts:
                os.utime(path, (FIRST_CHANGE_S, FIRST_CHANGE_S))
        self._changes = 0
        self.cpu_s = 0.0
        """Of the processor, for all tests until now."""

    def __enter__(self) -> "Lane":
        self._start()
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()

    def _start(self) -> None:
        variables = {
            "PYTHONPATH": str(self.tree),
            "TMPDIR": str(self.temporary),
            "PYTEST_DEBUG_TEMPROOT": str(self.temporary),
            "MUTANTS_LOG": str(self._log),
        }
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("warm.py"))],
            cwd=self.tree,
            env={**_without("PYTHONDONTWRITEBYTECODE"), **variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        if not self._process.stdout.readline():
            raise RuntimeError(f"the process that runs the tests does not start; {self._log} says why")

    def run(
        self, tests: list[str] | None, files: list[str], limit_s: float, stop: bool, seen: Path | None = None
    ) -> Any:
        """Returns the answer of ``warm.py``."""
        request = {"tests": tests, "files": files, "limit_s": limit_s, "stop": stop, "seen": seen and str(seen)}
        print(json.dumps(request), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        self._clean()
        if not line:
            self._process.wait()
            self._start()
            return {"events": [], "ended": "the process that runs the tests died", "s": 0.0}
        answer = json.loads(line)
        self.cpu_s += answer["cpu_s"]
        return answer

    def _clean(self) -> None:
        """Deletes what tests have left, such as prepared data, but not compiled code."""
        keep = [option for name in (".venv", "__pycache__", "_mutants_marks.py") for option in ("-e", name)]
        subprocess.run(["git", "-C", self.tree, "clean", "-fdxq", *keep], check=True)

    @contextmanager
    def changed(self, sources: dict[Path, bytes]) -> Iterator[None]:
        """Replaces files in the context."""
        before = {path: path.read_bytes() for path in sources}
        self._changes += 1
        try:
            for path, content in sources.items():
                path.write_bytes(content)
                os.utime(path, (FIRST_CHANGE_S + self._changes,) * 2)
            yield
        finally:
            for path, content in before.items():
                path.write_bytes(content)
                os.utime(path, (FIRST_CHANGE_S, FIRST_CHANGE_S))


def _without(variable: str) -> dict[str, str]:
    """Returns the environment without a variable, which would make each process compile all files."""
    return {name: value for name, value in os.environ.items() if name != variable}


def remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
