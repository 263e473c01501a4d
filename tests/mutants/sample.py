"""Draws mutants of a cosmic-ray session: ``python -m tests.mutants.sample SESSION --count 60 --seed 1``; the others are
skipped. At most one of a line, and the same ones while the code is the same."""

import random
from argparse import ArgumentParser, Namespace
from itertools import groupby

from cosmic_ray.tools.filters.filter_app import FilterApp
from cosmic_ray.work_db import WorkDB
from cosmic_ray.work_item import WorkerOutcome, WorkItem, WorkResult


class Sample(FilterApp):
    def add_args(self, parser: ArgumentParser) -> None:
        parser.add_argument("--count", type=int, default=60)
        parser.add_argument("--seed", type=int, default=1)

    def filter(self, work_db: WorkDB, args: Namespace) -> None:
        rng = random.Random(args.seed)
        order = sorted(work_db.pending_work_items, key=_place)
        lines = [rng.choice(list(items)) for _, items in groupby(order, key=lambda item: _place(item)[:2])]
        drawn = {item.job_id for item in rng.sample(lines, min(args.count, len(lines)))}
        skipped = [item.job_id for item in order if item.job_id not in drawn]
        work_db.set_multiple_results(skipped, WorkResult(WorkerOutcome.SKIPPED))
        print(f"{len(drawn)} of {len(order)} mutants drawn, of {len(lines)} lines")


def _place(item: WorkItem) -> tuple[str, int, int, str, int]:
    (mutation,) = item.mutations
    return str(mutation.module_path), *mutation.start_pos, mutation.operator_name, mutation.occurrence


if __name__ == "__main__":
    Sample().main()
