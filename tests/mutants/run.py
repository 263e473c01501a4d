"""Runs mutants in lanes beside each other, and writes a line for each one as soon as it is done."""

import ast
import json
import queue
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from tests.mutants import executed
from tests.mutants.choice import room_of
from tests.mutants.executed import Executed
from tests.mutants.fault import Mutant
from tests.mutants.lane import Lane, remove

FILE_S = 0.5
"""To import and collect a file of tests."""

FILE_LIMIT_S = 900.0
"""Longest for all tests of a file without a mutant."""

UNASKED = ("tests/slow/", "tests/mutants/", "tests/lane/test_mutations.py", "tests/launch/train/test_end_to_end.py")
"""Tests that are slow; those that change the code themselves, and look for a text that a mutant has changed; and a run
through Ray, whose start takes longer than all tests that are asked about a mutant."""

ROOT = Path(__file__).parents[2]

Job = TypeVar("Job")
Done = TypeVar("Done")


class Wanted(NamedTuple):
    """A mutant to run, and what an earlier run knows about it."""

    key: str
    mutant: Mutant | None
    """None when its code is gone."""
    finder: str = ""
    """The test that found it then; it is asked first."""


class Asked(NamedTuple):
    """The tests of a mutant, in their order."""

    tests: list[str]
    seconds: float
    left_out: int
    """Tests that execute the statement, but are over the budget."""


def head() -> str:
    """Returns the commit that is checked out, which is the one that is measured."""
    command = ["git", "rev-parse", "HEAD"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def run(out: Path, wanted: list[Wanted], candidates: list[Mutant], lane_count: int, budget_s: float) -> None:
    """Appends the results of the mutants that ``out`` does not have yet. Marks those of ``candidates`` too."""
    lines = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    have = {line["key"] for line in lines if "key" in line}
    if lines and lines[0]["commit"] != head():
        raise SystemExit(f"{out} is about commit {lines[0]['commit']}, and {head()} is checked out; name another file")
    missing = [one for one in wanted if one.key not in have]
    folder = Path(tempfile.mkdtemp(prefix="mutants-"))
    try:
        with ExitStack() as stack, out.open("a", buffering=1) as file:
            lanes = [stack.enter_context(Lane(ROOT, head(), folder / str(at))) for at in range(lane_count)]
            mutants = [*candidates, *(one.mutant for one in wanted if one.mutant)]
            known = _executed(lanes, out.with_suffix(".executed.jsonl"), mutants)
            if not lines:
                print(json.dumps({"commit": head(), "budget_s": budget_s, "failing": known.failing}), file=file)
            trial, begin = Trial(known, budget_s), time.monotonic()
            for at, result in enumerate(_in_lanes(lanes, missing, trial), 1):
                print(json.dumps(result), file=file)
                left = (time.monotonic() - begin) / at * (len(missing) - at) / 60
                print(f"{at} of {len(missing)}, {left:.0f} min left: {result['outcome']} {result['key']}", flush=True)
    finally:
        remove(folder)


def _in_lanes(lanes: list[Lane], jobs: Iterable[Job], work: Callable[[Lane, Job], Done]) -> Iterator[Done]:
    """Yields the results of jobs as they come; each lane does one job at a time."""
    free = queue.SimpleQueue[Lane]()
    for lane in lanes:
        free.put(lane)

    def do(job: Job) -> Done:
        lane = free.get()
        try:
            return work(lane, job)
        finally:
            free.put(lane)

    with ThreadPoolExecutor(len(lanes)) as pool:
        futures = [pool.submit(do, job) for job in jobs]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _executed(lanes: list[Lane], path: Path, mutants: list[Mutant]) -> Executed:
    """Returns what the tests execute, as far as possible from the file, which is of this commit."""
    statements = sorted({(mutant.file, mutant.statement) for mutant in mutants})
    imported = {
        (file, line)
        for file in {file for file, _ in statements}
        for line in executed.while_imported(ast.parse((ROOT / file).read_text()))
    }
    record = executed.Record(path, head(), statements)
    files = sorted((ROOT / "tests").rglob("test_*.py"), key=lambda file: -file.stat().st_size)
    names = [file.relative_to(ROOT).as_posix() for file in files]
    names = [name for name in names if not name.startswith(UNASKED) and name not in record.files]
    marks, begin = {lane: lane.tree.parent / "marks" for lane in lanes}, time.monotonic()

    def work(lane: Lane, name: str) -> tuple[str, Executed, float]:
        answer = lane.run(None, [name], FILE_LIMIT_S, stop=False, seen=marks[lane])
        return name, executed.of_file(name, answer, statements, imported), answer["cpu_s"]

    with ExitStack() as stack:
        for lane in lanes if names else []:
            stack.enter_context(lane.changed(executed.mark_statements(lane.tree, statements, marks[lane])))
        for at, (name, one, seconds) in enumerate(_in_lanes(lanes, names, work), 1):
            record.add(name, one)
            failing = f", failing: {', '.join(one.failing)}" if one.failing else ""
            passed = f"{at} of {len(names)} files, {time.monotonic() - begin:.0f} s"
            print(f"executed by tests, {passed}: {name}, {seconds:.0f} CPU s{failing}", flush=True)
    return record.read()


class Trial:
    """Runs the tests of one mutant. Called by several threads."""

    def __init__(self, known: Executed, budget_s: float) -> None:
        self._known, self._budget_s = known, budget_s
        self._trusted, self._failing = set[str](), {*known.failing}

    def __call__(self, lane: Lane, wanted: Wanted) -> dict[str, Any]:
        """Returns the result of a mutant."""
        mutant = wanted.mutant
        if mutant is None:
            return {"key": wanted.key, "outcome": "gone"}
        begin, used = time.monotonic(), lane.cpu_s
        while True:
            asked = self._asked(mutant, wanted.finder)
            outcome, by, error = self._outcome(lane, mutant, asked) if asked.tests else ("not executed", "", "")
            if not by or self._passes_alone(lane, by):
                break
            self._failing.add(by)
        return {
            "key": wanted.key,
            "identity": mutant[:6],
            "line": mutant.line,
            "replacement": mutant.replacement,
            "outcome": outcome,
            "by": by,
            "where": where(mutant.file, by) if by else "",
            "error": error,
            "tests": len(asked.tests),
            "left_out": asked.left_out,
            "s": round(time.monotonic() - begin, 1),
            "cpu_s": round(lane.cpu_s - used, 1),
        }

    def _asked(self, mutant: Mutant, finder: str) -> Asked:
        """Chooses tests within the budget: those of the mutant's own file first, then its room's, then all others; of
        these the cheapest files first."""
        statement = (mutant.file, mutant.statement)
        names = [
            name for name, several in self._known.tests.items() if statement in several and not name.startswith(UNASKED)
        ]
        files: dict[str, list[str]] = {}
        for name in sorted({*names} - self._failing, key=lambda name: (self._known.seconds[name], name)):
            files.setdefault(name.partition("::")[0], []).append(name)
        cost = {file: sum(self._known.seconds[name] for name in several) for file, several in files.items()}
        order = sorted(files, key=lambda file: (WHERE.index(where(mutant.file, file)), cost[file], file))
        asked, total, left_out = [], 0.0, 0
        for name in [name for file in order for name in files[file]]:
            seconds = self._known.seconds[name]
            if total and total + seconds > self._budget_s:
                left_out += 1
                continue
            is_first = name.partition("::")[0] not in {one.partition("::")[0] for one in asked[-1:]}
            total += seconds + (FILE_S if is_first else 0)
            asked.append(name)
        if finder in names:
            asked = [finder, *(name for name in asked if name != finder)]
        return Asked(asked, total, left_out)

    def _outcome(self, lane: Lane, mutant: Mutant, asked: Asked) -> tuple[str, str, str]:
        """Returns the outcome, the test that found the mutant, and its error."""
        path = lane.tree / mutant.file
        with lane.changed({path: mutant.applied(path.read_bytes())}):
            answer = lane.run(asked.tests, files_of(asked.tests), 3 * asked.seconds + 60, stop=True)
        last = asked.tests[0]
        for kind, *event in answer["events"]:
            if kind in ("failed", "broken"):
                return "found", event[0], event[-1]
            last = event[0] if kind == "start" else last
        if answer["ended"] == "limit":
            return "hangs", last, ""
        if answer["ended"] in ("exit 0", "exit 5"):  # 5: with the mutant the tests have other names
            return "not found", "", ""
        return "found", last, answer["ended"]

    def _passes_alone(self, lane: Lane, test: str) -> bool:
        """Whether a test that found a mutant passes without it. A file that cannot be collected is no test."""
        if test in self._trusted or "::" not in test:
            return True
        answer = lane.run([test], files_of([test]), 3 * self._known.seconds[test] + 60, stop=True)
        if answer["ended"] == "exit 0":
            self._trusted.add(test)
        return answer["ended"] == "exit 0"


def files_of(tests: Iterable[str]) -> list[str]:
    """Returns the files of tests, each once, in their order."""
    return [*dict.fromkeys(test.partition("::")[0] for test in tests)]


WHERE = ("its file", "its room", "other files")


def where(file: str, test: str) -> str:
    """Says how near a test is to a file. ``tests/suite/data/test_cache.py`` has the tests of ``suite/data/cache.py``,
    ``tests/suite/data`` and its folders those of the room ``suite/data``."""
    folder, _, name = file.rpartition("/")
    test = test.partition("::")[0]
    if test == f"tests/{folder}/test_{name}":
        return "its file"
    room = f"tests/{room_of(file)}/"
    is_near = test.startswith(room) and (room != "tests/suite/" or test.count("/") == 2)
    return "its room" if is_near else "other files"
