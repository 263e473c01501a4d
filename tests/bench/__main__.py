"""The command of the benchmark: ``make bench NAME=``."""

import sys

from rich.console import Console
from rich.table import Table

from suite.errors import SuiteError
from tests.bench.bench import bench
from tests.bench.cases import CASES


def main(name: str) -> int:
    """Runs the cases of a name, or lists them; returns the exit code: 1 if gradients are wrong, 2 for a wrong name."""
    console, errors = Console(), Console(stderr=True, soft_wrap=True, highlight=False)
    if not name:
        console.print(benchmarks())
        return 0
    try:
        wrong = bench(name, console)
    except SuiteError as error:
        errors.print(f"error: {error}", markup=False)
        return 2
    except KeyboardInterrupt:
        return 130
    for sentence in wrong:
        errors.print(f"wrong: {sentence}", markup=False)
    return 1 if wrong else 0


def benchmarks() -> Table:
    title = "benchmarks: make bench NAME=... (docs/benchmark.md)"
    rows = Table("NAME", "cases", "rounds", title=title, title_justify="left")
    for name, cases in CASES.items():
        rows.add_row(name, "\n".join(case.title for case in cases), str(cases[0].rounds))
    return rows


if __name__ == "__main__":
    sys.exit(main(" ".join(sys.argv[1:])))
