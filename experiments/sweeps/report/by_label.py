"""The report of a sweep of your own: a row and a curve for each label, over its seeds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from experiments.report.page import Page, Section
from experiments.report.table import Table, Value, readable
from experiments.sweeps.members.base import Member, Report, read_record
from experiments.sweeps.report.figures import step_curves
from experiments.sweeps.report.margins import mean_and_margin
from experiments.sweeps.report.results import Run


def label_report(title: str, about: Sequence[str], members: Sequence[Member], runs: Path) -> Report:
    """Returns the report of the finished members: what is missing, a table by label, the loss curves, all runs."""
    finished = [
        Run(member, runs / member.folder, record, {})
        for member in members
        if (record := read_record(runs / member.folder)) is not None and member.experiment.is_finished(record)
    ]
    folders = {run.member.folder for run in finished}
    missing = [member.folder for member in members if member.folder not in folders]
    what = [f"{len(finished)} of {len(members)} runs are finished."]
    what += [f"Not finished, and excluded from all numbers: {', '.join(missing)}."] if missing else []
    table = _by_label(finished, members)
    sections = [
        Section("What was compared", [*about, *what]),
        Section("Results", tables=[table]),
        Section("Losses", pictures=step_curves(finished)),
        Section("Runs", tables=[_runs(finished)]),
    ]
    return Report(Page(title, sections), [table])


def _by_label(finished: Sequence[Run], members: Sequence[Member]) -> Table:
    headings = ("run", "measure", "held-out mean", "seeds", "last training loss", "steps", "per second", "parameters")
    rows: list[list[Value]] = []
    for label in dict.fromkeys(member.label for member in members):
        records = [run.record for run in finished if run.member.label == label]
        if not records:
            rows.append([label, None, None, 0, *[None] * 4])
            continue
        first = records[0]
        unit, measure = first["unit"], first["measure"]
        scores = [float(record[key]) for record in records if (key := f"valid_{measure}") in record]
        losses = [float(record["loss_last"]) for record in records if record["loss_last"] is not None]
        speed = statistics.fmean(record[f"{unit}_per_second"] for record in records)
        rows.append(
            [
                label,
                measure if scores else None,
                mean_and_margin(scores),
                len(records),
                mean_and_margin(losses),
                first["steps"],
                f"{readable(float(speed))} {unit}",
                first["parameters"],
            ]
        )
    notes = [
        "Measured. ± is the 95% confidence interval of the mean over seeds (Student's t). It covers the seeds' chance, "
        "not that of the held-out data. Speeds are of members that may have run side by side."
    ]
    return Table("by-label", "Runs by label", headings, rows, notes)


def _runs(finished: Sequence[Run]) -> Table:
    headings = ("folder", "run", "seed", "K", "R", "steps", "seconds", "first loss", "last loss", "held out")
    rows: list[list[Value]] = [
        [
            run.member.folder, run.member.label, run.member.experiment.train.seed, run.record["K"], run.record["R"],
            run.record["steps"], run.record["seconds"], run.record["loss_first"], run.record["loss_last"],
            run.record.get(f"valid_{run.record['measure']}"),
        ]
        for run in finished
    ]  # fmt: skip
    return Table("runs", "All runs (measured)", headings, rows or [[None] * len(headings)], [])
