"""The command of the mutants: ``run``, ``table``, ``compare``."""

import argparse
from pathlib import Path

from tests.mutants import table
from tests.mutants.by_hand import FAULTS
from tests.mutants.choice import SEED, SHARES, all_mutants, choose, find_again, room_of
from tests.mutants.fault import Mutant
from tests.mutants.operators import by_hand
from tests.mutants.run import ROOT, Wanted, run


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run", help="run mutants of the commit that is checked out")
    running.add_argument("out", type=Path, help="file of results, a JSON line each; those in it are not run again")
    running.add_argument("--count", type=int, default=640, help="generated mutants of all rooms")
    running.add_argument("--seed", type=int, default=SEED)
    running.add_argument("--room", choices=SHARES, help="those of one room alone")
    running.add_argument("--by-hand", action="store_true", help="the faults of by_hand.py alone")
    running.add_argument("--same-as", type=Path, help="the mutants of an earlier file of results")
    running.add_argument("--every", type=int, default=1, help="only each n-th of them, for an estimate of the time")
    running.add_argument("--lanes", type=int, default=2, help="mutants at a time, about one per core")
    running.add_argument("--budget-s", type=float, default=60.0, help="longest tests of a mutant together")
    showing = commands.add_parser("table", help="print counts by room, and the mutants that no test found")
    showing.add_argument("out", type=Path)
    showing.add_argument("--all", action="store_true", help="a row for each mutant, with the test that found it first")
    showing.add_argument("--finders", action="store_true", help="the tests that found the most")
    comparing = commands.add_parser("compare", help="print what is found before and not after")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    options = parser.parse_args()
    if options.command == "run":
        candidates, faults = all_mutants(ROOT), faults_by_hand()
        in_rooms = [mutant for mutant in candidates if room_of(mutant.file) in SHARES]
        marked = [*in_rooms, *(mutant for mutant in faults.values() if mutant)]
        mutants = wanted(options, candidates, faults)[:: options.every]
        run(options.out.resolve(), mutants, marked, options.lanes, options.budget_s)
    elif options.command == "table":
        show = table.everything if options.all else table.finders if options.finders else table.summary
        print(show(options.out), end="")
    else:
        print(table.compare(options.before, options.after), end="")


def wanted(options: argparse.Namespace, candidates: list[Mutant], faults: dict[str, Mutant | None]) -> list[Wanted]:
    """Returns the mutants that the options ask for."""
    if options.same_as:
        return again(options.same_as, candidates, faults)
    chosen = [] if options.by_hand else choose(candidates, options.count, options.seed)
    chosen += [mutant for mutant in faults.values() if mutant]
    return [Wanted(one.key, one) for one in chosen if options.room in (None, room_of(one.file))]


def again(path: Path, candidates: list[Mutant], faults: dict[str, Mutant | None]) -> list[Wanted]:
    """Returns the mutants of an earlier run as they are now."""
    found = []
    for key, line in table.results(path)[1].items():
        if line["outcome"] != "gone":
            old = Mutant(*line["identity"], 0, 0, line["replacement"], line["line"], 0)
            is_by_hand = old.operator == table.BY_HAND
            new = faults.get(old.text) if is_by_hand else find_again(old, candidates)
            found.append(Wanted(key, new, line["by"]))
    return found


def faults_by_hand() -> dict[str, Mutant | None]:
    """Returns the faults of ``by_hand.py`` by what is wrong; None for one whose text is gone."""
    sources = {fault.file: ROOT / fault.file for fault in FAULTS}
    return {
        fault.what: by_hand(fault, sources[fault.file].read_bytes()) if sources[fault.file].exists() else None
        for fault in FAULTS
    }


if __name__ == "__main__":
    main()
