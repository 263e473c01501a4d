"""Runs all slow tests, two files side by side, and writes their outcome to docs/results/test-faults.md.

Each file has a process of its own, because Ray keeps its first settings, such as a token, until the process ends; so
have the tests of other folders that are marked as slow, together. Files that start clusters use the same ports, so one
lane runs them one after another; the other lane runs the other files, which both share once no clusters are left.
What is measured in seconds comes last, alone.
"""

import subprocess
import sys
import threading
import time
from collections import deque
from datetime import UTC, datetime
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
OUTCOME = ROOT / "docs/results/test-faults.md"
MARKED = ROOT / "tests"
"""Stands for the tests that are marked as slow."""

CLUSTERS = (
    "deploy", "diagnostics", "jobs", "sweeps", "test_driver", "test_hosts", "test_nodes",
    "test_ray_train", "test_unshared_node",
)  # fmt: skip
MEASUREMENTS = ("test_slow_links", "test_slow_node")
DEADLINE_S = 5400.0  # of one file; each test has its own of half an hour


def main() -> int:
    """Returns 1 if a file failed."""
    commit = described()
    files = [MARKED, *sorted(HERE.glob("*/test_*.py"))]  # the first takes long
    alone = deque(path for path in files if path.stem in MEASUREMENTS)
    side_by_side = [path for path in files if path not in alone]
    with_cluster = deque(path for path in side_by_side if {path.parent.name, path.stem} & {*CLUSTERS})
    others = deque(path for path in side_by_side if path not in with_cluster)
    rows: dict[Path, str] = {}
    failed: list[Path] = []
    begun, lock = time.monotonic(), threading.Lock()

    def next_file(queues: tuple[deque[Path], ...]) -> Path | None:
        with lock:
            return next((queue.popleft() for queue in queues if queue), None)

    def run_all(*queues: deque[Path]) -> None:
        while path := next_file(queues):
            print(f"{_name(path)}: started", flush=True)
            has_passed, row = _run(path)
            with lock:
                rows[path] = row
                failed.extend([] if has_passed else [path])
                _write(commit, [rows[key] for key in files if key in rows], len(files), time.monotonic() - begun)

    lanes = [
        threading.Thread(target=run_all, args=queues, daemon=True)  # an interrupt ends both
        for queues in ((with_cluster, others), (others,))
    ]
    for lane in lanes:
        lane.start()
    for lane in lanes:
        lane.join()
    run_all(alone)
    print(f"{len(files) - len(failed)} of {len(files)} files passed; {OUTCOME.relative_to(ROOT)} has them all")
    return int(bool(failed))


def _run(path: Path) -> tuple[bool, str]:
    """Returns whether a file passed, and its row."""
    begun = time.monotonic()
    chosen = ["-m", "slow"] if path == MARKED else [str(path)]
    command = [sys.executable, "-m", "pytest", "-n", "0", "--timeout", "1800", *chosen]
    try:
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S)
        has_passed, text = ended.returncode == 0, ended.stdout + ended.stderr
        outcome = next((line for line in reversed(ended.stdout.splitlines()) if " in " in line), "no outcome")
        outcome = outcome.strip("= ").split(" in ")[0]
    except subprocess.TimeoutExpired as error:
        has_passed, text, outcome = False, str(error), f"no end within {DEADLINE_S:.0f} s"
    seconds = time.monotonic() - begun
    print("" if has_passed else f"{text}\n", f"{_name(path)}: {outcome}, {seconds:.0f} s", sep="", flush=True)
    return has_passed, f"| `{_name(path)}` | {outcome} | {seconds:.0f} |"


def _write(commit: str, rows: list[str], files: int, seconds: float) -> None:
    lines = [
        "# The slow tests: `make test-faults`",
        "",
        f"Measured, commit `{commit}`, {datetime.now(UTC):%Y-%m-%d}: {len(rows)} of {files} files in {seconds / 60:.0f}"
        " minutes, two side by side; what is measured in seconds alone.",
        "",
        "| tests in `tests/slow` | outcome | seconds |",
        "|---|---|---|",
        *rows,
    ]
    OUTCOME.write_text("\n".join(lines) + "\n")


def _name(path: Path) -> str:
    return "marked as slow in tests/" if path == MARKED else path.relative_to(HERE).as_posix()


def described() -> str:
    """Returns the name of the commit that is checked out."""
    command = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
