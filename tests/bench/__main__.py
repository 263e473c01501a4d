"""The command of the benchmark: ``make bench NAME=``."""

import sys

from rich.console import Console
from rich.table import Table

from suite.errors import SuiteError
from tests.bench.bench import FOLDER, bench
from tests.bench.cases import CASES
from tests.bench.prediction import ROUNDS, prediction_table

PREDICTION = "prediction"


def main(name: str) -> int:
    """Runs the cases of a name, or lists them; returns the exit code: 1 if gradients are wrong, 2 for a wrong name."""
    console, errors = Console(), Console(stderr=True, soft_wrap=True, highlight=False)
    if not name:
        console.print(benchmarks())
        return 0
    try:
        if name == PREDICTION:
            table = prediction_table(console.print)
            console.print(table.rich_table() if console.is_terminal else table.markdown())
            console.print(f"written: {', '.join(map(str, table.write(FOLDER)))}")
            return 0
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
    rows.add_row(PREDICTION, "the plans of three models compared with their runs", str(ROUNDS))
    return rows


if __name__ == "__main__":
    sys.exit(main(" ".join(sys.argv[1:])))
