"""``python -m tests.record make`` and ``compare``."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor, as_completed
from datetime import UTC, datetime
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from tests.launch.command_line import ROOT
from tests.record.compare import differences, information
from tests.record.gpipe import ENVIRONMENT
from tests.record.job import Job

AT_ONCE = 2


PARTS = {
    "tables": "pages:table_jobs",
    "help": "pages:help_jobs",
    "data": "data:data_jobs",
    "examples": "runs:example_jobs",
    "runs": "runs:run_jobs",
    "best": "plans:best_jobs",
    "plans": "plans:plan_jobs",
}
"""Module and function of each part, imported when it is made."""

FED = ("best", "plans")
"""Parts whose processes take their costs from elsewhere, and so make no other part."""


def jobs_of(part: str, work: Path, saved: dict[str, Any]) -> list[Job]:
    """Returns the jobs of a part, which may use the folder ``work`` and the ``saved`` costs."""
    module, _, function = PARTS[part].partition(":")
    return list(getattr(import_module(f"tests.record.{module}"), function)(work, saved))


def commit() -> str:
    """Returns the commit that is checked out; with ``-dirty`` if tracked files differ from it."""
    describe = ["git", "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty"]
    return subprocess.run(describe, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def make(file: Path, only: list[str], saved: dict[str, Any]) -> int:
    """Writes the record, and returns the exit code: 1 if something could not be made."""
    record: dict[str, Any] = {"commit": commit(), "parts": {}}
    if only and file.exists():
        record = json.loads(file.read_text())
        if record["commit"] != commit():
            return misuse(f"{file} is of commit {record['commit']}, this is {commit()}; name another file")
    pairs = [part.partition("/")[::2] for part in only or PARTS]
    texts = {part: [text for name, text in pairs if name == part] for part, _ in pairs}
    if unknown := set(texts) - set(PARTS):
        return misuse(f"no part is called {', '.join(sorted(unknown))}; parts are {', '.join(PARTS)}")
    failures = 0
    for group in ([part for part in PARTS if part in texts and (part in FED) == fed] for fed in (False, True)):
        with tempfile.TemporaryDirectory(prefix="record-") as work:
            jobs = [(part, job) for part in group for job in jobs_of(part, Path(work), saved)]
            made = run([(part, job) for part, job in jobs if any(text in job.name for text in texts[part])])
        for part in group:
            costs = record["parts"].setdefault("costs", {}) if part in FED else {}
            for entry in made[part].values():
                costs |= {key: {"result": value} for key, value in entry.pop("costs", {}).items()}
            failed = [name for name, entry in made[part].items() if "error" in entry["result"]]
            failures += len(failed)
            seconds = sum(entry["seconds"] for entry in made[part].values())
            print(f"{part}: {seconds:.0f} s in one process, {len(made[part])} entries, {len(failed)} errors")
            record["parts"][part] = (record["parts"].get(part, {}) if all(texts[part]) else {}) | made[part]
        record["date"] = f"{datetime.now(UTC):%Y-%m-%d %H:%M}"
        file.write_text(json.dumps(record, separators=(",", ":")) + "\n")
    return 1 if failures else 0


def run(jobs: list[tuple[str, Job]]) -> dict[str, dict[str, Any]]:
    """Runs jobs of some parts two at a time; returns their entries by part and name."""
    made: dict[str, dict[str, Any]] = {part: {} for part in PARTS}
    with ProcessPoolExecutor(AT_ONCE, get_context("spawn")) as pool:
        futures = {pool.submit(job.entry): (part, job.name) for part, job in jobs}
        for at, done in enumerate(as_completed(futures), 1):
            part, name = futures[done]
            entry = made[part][name] = done.result()
            failure = f": {entry['result']['error']}" if "error" in entry["result"] else ""
            print(f"{at}/{len(jobs)} {part}/{name}, {entry['seconds']:.0f} s{failure}", flush=True)
    return made


def compare(a: Path, b: Path) -> int:
    """Prints what differs between two records; returns the exit code."""
    first, second = (json.loads(path.read_text()) for path in (a, b))
    found = differences(first, second)
    for line in found or ["equal"]:
        print(line)
    for line in information(first, second):
        print(f"for information: {line}")
    return 1 if found else 0


def misuse(sentence: str) -> int:
    print(f"error: {sentence}", file=sys.stderr)
    return 2


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.record", description=sys.modules["tests.record"].__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("make", help="write the record of this commit")
    making.add_argument("file", type=Path)
    making.add_argument("--only", default="", metavar="PART[,PART]", help="update these parts, or entries (PART/TEXT)")
    making.add_argument("--costs", type=Path, metavar="RECORD", help="plan from the costs of this older record")
    comparing = commands.add_parser("compare", help="print what differs")
    comparing.add_argument("a", type=Path)
    comparing.add_argument("b", type=Path)
    given = parser.parse_args()
    os.environ |= ENVIRONMENT
    try:
        if given.command == "compare":
            return compare(given.a, given.b)
        saved = json.loads(given.costs.read_text())["parts"]["costs"] if given.costs else {}
        return make(given.file, given.only.split(",") if given.only else [], {k: v["result"] for k, v in saved.items()})
    except (OSError, ValueError, KeyError) as error:
        return misuse(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    sys.exit(main())
